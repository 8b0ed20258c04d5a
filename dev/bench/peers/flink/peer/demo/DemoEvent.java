package peer.demo;

import java.math.BigDecimal;
import java.nio.ByteBuffer;

/** A transaction as the demo models it: a POJO with a BigDecimal amount. Times in microseconds since 1970. */
public class DemoEvent {
    public long eventId;
    public long eventTime;
    public int customerId;
    public int terminalId;
    public BigDecimal amount;

    public DemoEvent() {}

    /** A new object for each record: the demo does not reuse objects. */
    public static DemoEvent decode(ByteBuffer block, int at) {
        DemoEvent event = new DemoEvent();
        event.eventId = block.getLong(at);
        event.eventTime = block.getLong(at + 8);
        event.customerId = block.getInt(at + 16);
        event.terminalId = block.getInt(at + 20);
        event.amount = BigDecimal.valueOf(block.getInt(at + 24), 2);
        return event;
    }

    @Override
    public boolean equals(Object other) {
        return other instanceof DemoEvent && ((DemoEvent) other).eventId == eventId;
    }

    @Override
    public int hashCode() {
        return Long.hashCode(eventId);
    }
}
