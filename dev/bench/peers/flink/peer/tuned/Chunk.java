package peer.tuned;

import java.lang.invoke.MethodHandles;
import java.lang.invoke.VarHandle;
import java.nio.ByteOrder;
import java.util.Arrays;

/**
 * A run of events in order of time, read and changed as the bytes that RocksDB keeps, without an object between.
 *
 * <p>Layout: base (long: the sum of all weights before this chunk), id (int), first (int: the oldest chunk kept), low
 * (int: the chunk where the last window began), 4 bytes of nothing; then for each event its time (long) and weight
 * (int). first and low are of use in the youngest chunk only.
 */
final class Chunk {
    private static final VarHandle LONG =
            MethodHandles.byteArrayViewVarHandle(long[].class, ByteOrder.LITTLE_ENDIAN);
    private static final VarHandle INT = MethodHandles.byteArrayViewVarHandle(int[].class, ByteOrder.LITTLE_ENDIAN);
    private static final int HEADER = 24;
    private static final int ENTRY = 12;

    private Chunk() {}

    static byte[] empty() {
        return new byte[HEADER];
    }

    static int count(byte[] chunk) {
        return (chunk.length - HEADER) / ENTRY;
    }

    static long base(byte[] chunk) {
        return (long) LONG.get(chunk, 0);
    }

    static void raiseBase(byte[] chunk, long by) {
        LONG.set(chunk, 0, base(chunk) + by);
    }

    static int id(byte[] chunk) {
        return (int) INT.get(chunk, 8);
    }

    static void setId(byte[] chunk, int id) {
        INT.set(chunk, 8, id);
    }

    static int first(byte[] chunk) {
        return (int) INT.get(chunk, 12);
    }

    static void setFirst(byte[] chunk, int id) {
        INT.set(chunk, 12, id);
    }

    static int low(byte[] chunk) {
        return (int) INT.get(chunk, 16);
    }

    static void setLow(byte[] chunk, int id) {
        INT.set(chunk, 16, id);
    }

    static long time(byte[] chunk, int i) {
        return (long) LONG.get(chunk, HEADER + i * ENTRY);
    }

    static long firstTime(byte[] chunk) {
        return time(chunk, 0);
    }

    static long lastTime(byte[] chunk) {
        return (long) LONG.get(chunk, chunk.length - ENTRY);
    }

    /** The sum of everything before `time`, given that `time` falls into this chunk or to one of its ends. */
    static long sumBefore(byte[] chunk, long time) {
        int to = firstFrom(chunk, time);
        return base(chunk) + sum(chunk, to);
    }

    private static long sum(byte[] chunk, int to) {
        long sum = 0;
        for (int at = HEADER + 8, end = HEADER + to * ENTRY; at < end; at += ENTRY) {
            sum += (int) INT.get(chunk, at);
        }
        return sum;
    }

    private static int firstFrom(byte[] chunk, long time) {
        int from = 0;
        int to = count(chunk);
        while (from < to) {
            int middle = (from + to) >>> 1;
            if (time(chunk, middle) < time) {
                from = middle + 1;
            } else {
                to = middle;
            }
        }
        return from;
    }

    /** With one event more, after those of the same time. */
    static byte[] with(byte[] chunk, long time, int weight) {
        int count = count(chunk);
        int i = count == 0 || lastTime(chunk) <= time ? count : firstFrom(chunk, time + 1);
        int at = HEADER + i * ENTRY;
        byte[] longer = new byte[chunk.length + ENTRY];
        System.arraycopy(chunk, 0, longer, 0, at);
        LONG.set(longer, at, time);
        INT.set(longer, at + 8, weight);
        System.arraycopy(chunk, at, longer, at + ENTRY, chunk.length - at);
        return longer;
    }

    /** Without the events before `from`. */
    static byte[] since(byte[] chunk, long from) {
        return count(chunk) == 0 || firstTime(chunk) >= from ? chunk : without(chunk, firstFrom(chunk, from));
    }

    /** Without the first `count` events; the base takes in what they weighed. */
    static byte[] without(byte[] chunk, int count) {
        byte[] shorter = new byte[chunk.length - count * ENTRY];
        System.arraycopy(chunk, 0, shorter, 0, HEADER);
        System.arraycopy(chunk, HEADER + count * ENTRY, shorter, HEADER, shorter.length - HEADER);
        raiseBase(shorter, sum(chunk, count));
        return shorter;
    }

    /** Only the first `count` events. */
    static byte[] upTo(byte[] chunk, int count) {
        return Arrays.copyOf(chunk, HEADER + count * ENTRY);
    }
}
