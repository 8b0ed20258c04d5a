package peer.tuned;

import java.nio.ByteBuffer;
import peer.RecordFormat;

/** A transaction in primitive fields. Times in microseconds since 1970. */
public final class Event {
    public long eventId;
    public long eventTime;
    public int customerId;
    public int terminalId;
    public int amountCents;

    /** Fills one object again and again: whatever follows the source writes it to the network before the next. */
    public static final class Decoder implements RecordFormat.Decoder<Event> {
        private static final long serialVersionUID = 1L;
        private transient Event event;

        @Override
        public Event decode(ByteBuffer block, int at) {
            if (event == null) {
                event = new Event();
            }
            event.eventId = block.getLong(at);
            event.eventTime = block.getLong(at + 8);
            event.customerId = block.getInt(at + 16);
            event.terminalId = block.getInt(at + 20);
            event.amountCents = block.getInt(at + 24);
            return event;
        }
    }
}
