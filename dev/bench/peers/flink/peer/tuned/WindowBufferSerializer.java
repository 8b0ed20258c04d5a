package peer.tuned;

import java.io.IOException;
import org.apache.flink.api.common.typeutils.SimpleTypeSerializerSnapshot;
import org.apache.flink.api.common.typeutils.TypeSerializerSnapshot;
import org.apache.flink.api.common.typeutils.base.TypeSerializerSingleton;
import org.apache.flink.core.memory.DataInputView;
import org.apache.flink.core.memory.DataOutputView;

/** Times and running sums as they are; copies (made of what is touched during a checkpoint) are two array copies. */
public final class WindowBufferSerializer extends TypeSerializerSingleton<WindowBuffer> {
    private static final long serialVersionUID = 1L;
    public static final WindowBufferSerializer INSTANCE = new WindowBufferSerializer();

    @Override
    public boolean isImmutableType() {
        return false;
    }

    @Override
    public WindowBuffer createInstance() {
        return new WindowBuffer();
    }

    @Override
    public WindowBuffer copy(WindowBuffer from) {
        int count = from.tail - from.head;
        WindowBuffer to = new WindowBuffer(room(count));
        System.arraycopy(from.times, from.head, to.times, 0, count);
        System.arraycopy(from.sums, from.head, to.sums, 0, count);
        to.tail = count;
        to.base = from.base;
        return to;
    }

    @Override
    public WindowBuffer copy(WindowBuffer from, WindowBuffer reuse) {
        return copy(from);
    }

    @Override
    public int getLength() {
        return -1;
    }

    @Override
    public void serialize(WindowBuffer buffer, DataOutputView target) throws IOException {
        target.writeInt(buffer.tail - buffer.head);
        target.writeLong(buffer.base);
        for (int i = buffer.head; i < buffer.tail; i++) {
            target.writeLong(buffer.times[i]);
            target.writeLong(buffer.sums[i]);
        }
    }

    @Override
    public WindowBuffer deserialize(DataInputView source) throws IOException {
        int count = source.readInt();
        WindowBuffer buffer = new WindowBuffer(room(count));
        buffer.base = source.readLong();
        for (int i = 0; i < count; i++) {
            buffer.times[i] = source.readLong();
            buffer.sums[i] = source.readLong();
        }
        buffer.tail = count;
        return buffer;
    }

    @Override
    public WindowBuffer deserialize(WindowBuffer reuse, DataInputView source) throws IOException {
        return deserialize(source);
    }

    @Override
    public void copy(DataInputView source, DataOutputView target) throws IOException {
        int count = source.readInt();
        target.writeInt(count);
        target.write(source, Long.BYTES + count * 2 * Long.BYTES);
    }

    @Override
    public TypeSerializerSnapshot<WindowBuffer> snapshotConfiguration() {
        return new Snapshot();
    }

    private static int room(int count) {
        return count + (count >> 2) + 4;
    }

    /** What a checkpoint keeps about this serializer. */
    public static final class Snapshot extends SimpleTypeSerializerSnapshot<WindowBuffer> {
        public Snapshot() {
            super(() -> INSTANCE);
        }
    }
}
