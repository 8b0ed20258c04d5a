package peer.tuned;

import org.apache.flink.api.common.functions.OpenContext;
import org.apache.flink.api.common.state.MapState;
import org.apache.flink.api.common.state.MapStateDescriptor;
import org.apache.flink.api.common.state.ValueState;
import org.apache.flink.api.common.state.ValueStateDescriptor;
import org.apache.flink.api.common.typeutils.base.IntSerializer;
import org.apache.flink.api.common.typeutils.base.array.BytePrimitiveArraySerializer;
import peer.Rule;

/**
 * For RocksDB, where what an event costs is the number and size of the values read and written for it.
 *
 * <p>The youngest events of a key are one small value, the tail: of most keys that is all, one read and one write an
 * event. A full tail seals its older part as a chunk with a number, and these are read only where a window begins or
 * a late event goes. Every chunk knows the sum of all before it, so that a window is valued from its two ends, however
 * many chunks lie between.
 */
public final class RocksJudge extends Judge {
    private static final long serialVersionUID = 1L;

    /** A tail of so many events seals all but the youngest, which are kept for events a little late. */
    private static final int FULL = 64;

    private static final int KEPT = 16;

    private transient ValueState<byte[]> tailState;
    private transient MapState<Integer, byte[]> sealed;

    public RocksJudge(Rule rule) {
        super(rule);
    }

    @Override
    public void open(OpenContext context) throws Exception {
        super.open(context);
        tailState = getRuntimeContext()
                .getState(new ValueStateDescriptor<>("tail", BytePrimitiveArraySerializer.INSTANCE));
        sealed = getRuntimeContext()
                .getMapState(new MapStateDescriptor<>(
                        "sealed", IntSerializer.INSTANCE, BytePrimitiveArraySerializer.INSTANCE));
    }

    @Override
    long value(long time, boolean counts, int weight, long keptFrom) throws Exception {
        byte[] tail = tailState.value();
        if (tail == null) {
            if (!counts) {
                return 0;
            }
            tail = Chunk.empty();
        }
        if (counts) {
            boolean alone = Chunk.first(tail) == Chunk.id(tail);
            if (alone) {
                tail = Chunk.since(tail, keptFrom);
            }
            if (alone || time >= Chunk.firstTime(tail)) {
                tail = Chunk.with(tail, time, weight);
            } else {
                addBelow(tail, time, weight);
            }
            if (Chunk.count(tail) >= FULL) {
                tail = seal(tail, keptFrom);
            }
        }
        long value = sumBefore(tail, time + 1, Chunk.id(tail) - 1, false)
                - sumBefore(tail, time - window, Chunk.low(tail), true);
        if (counts) {
            tailState.update(tail);
        }
        return value;
    }

    /** Puts an event that is older than the tail where it belongs. */
    private void addBelow(byte[] tail, long time, int weight) throws Exception {
        Chunk.raiseBase(tail, weight);
        int first = Chunk.first(tail);
        int id = Chunk.id(tail) - 1;
        byte[] chunk = sealed.get(id);
        while (id > first && time < Chunk.firstTime(chunk)) {
            Chunk.raiseBase(chunk, weight);
            sealed.put(id, chunk);
            chunk = sealed.get(--id);
        }
        sealed.put(id, Chunk.with(chunk, time, weight));
    }

    /** Seals the older part of the tail and forgets the chunks that are too old. */
    private byte[] seal(byte[] full, long keptFrom) throws Exception {
        int id = Chunk.id(full);
        int count = Chunk.count(full) - KEPT;
        sealed.put(id, Chunk.upTo(full, count));
        byte[] tail = Chunk.without(full, count);
        Chunk.setId(tail, id + 1);
        int first = Chunk.first(tail);
        while (first < id && Chunk.lastTime(sealed.get(first)) < keptFrom) {
            sealed.remove(first++);
        }
        Chunk.setFirst(tail, first);
        return tail;
    }

    /**
     * The sum of all weights before a time.
     *
     * @param near the number of a chunk from which the search goes step by step
     * @param remember whether the tail is to know the chunk found, for the next search
     */
    private long sumBefore(byte[] tail, long time, int near, boolean remember) throws Exception {
        int first = Chunk.first(tail);
        int end = Chunk.id(tail);
        if (first == end || Chunk.firstTime(tail) < time) {
            return Chunk.sumBefore(tail, time);
        }
        int id = Math.min(Math.max(near, first), end - 1);
        byte[] chunk = sealed.get(id);
        while (id > first && Chunk.firstTime(chunk) >= time) {
            chunk = sealed.get(--id);
        }
        while (id + 1 < end && Chunk.lastTime(chunk) < time) {
            byte[] next = sealed.get(id + 1);
            if (Chunk.firstTime(next) >= time) {
                break;
            }
            chunk = next;
            id++;
        }
        if (remember) {
            Chunk.setLow(tail, id);
        }
        return Chunk.sumBefore(chunk, time);
    }
}
