package peer.tuned;

import java.io.IOException;
import org.apache.flink.api.common.typeutils.SimpleTypeSerializerSnapshot;
import org.apache.flink.api.common.typeutils.TypeSerializerSnapshot;
import org.apache.flink.api.common.typeutils.base.TypeSerializerSingleton;
import org.apache.flink.core.memory.DataInputView;
import org.apache.flink.core.memory.DataOutputView;

/** 28 bytes an event. */
public final class EventSerializer extends TypeSerializerSingleton<Event> {
    private static final long serialVersionUID = 1L;
    public static final EventSerializer INSTANCE = new EventSerializer();

    @Override
    public boolean isImmutableType() {
        return false;
    }

    @Override
    public Event createInstance() {
        return new Event();
    }

    @Override
    public Event copy(Event from) {
        return copy(from, new Event());
    }

    @Override
    public Event copy(Event from, Event to) {
        to.eventId = from.eventId;
        to.eventTime = from.eventTime;
        to.customerId = from.customerId;
        to.terminalId = from.terminalId;
        to.amountCents = from.amountCents;
        return to;
    }

    @Override
    public int getLength() {
        return 28;
    }

    @Override
    public void serialize(Event event, DataOutputView target) throws IOException {
        target.writeLong(event.eventId);
        target.writeLong(event.eventTime);
        target.writeInt(event.customerId);
        target.writeInt(event.terminalId);
        target.writeInt(event.amountCents);
    }

    @Override
    public Event deserialize(DataInputView source) throws IOException {
        return deserialize(new Event(), source);
    }

    @Override
    public Event deserialize(Event event, DataInputView source) throws IOException {
        event.eventId = source.readLong();
        event.eventTime = source.readLong();
        event.customerId = source.readInt();
        event.terminalId = source.readInt();
        event.amountCents = source.readInt();
        return event;
    }

    @Override
    public void copy(DataInputView source, DataOutputView target) throws IOException {
        target.write(source, 28);
    }

    @Override
    public TypeSerializerSnapshot<Event> snapshotConfiguration() {
        return new Snapshot();
    }

    /** What a checkpoint keeps about this serializer. */
    public static final class Snapshot extends SimpleTypeSerializerSnapshot<Event> {
        public Snapshot() {
            super(() -> INSTANCE);
        }
    }
}
