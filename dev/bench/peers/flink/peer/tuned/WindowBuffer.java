package peer.tuned;

import java.util.Arrays;

/**
 * The events of one key in order of time, with running sums: the value of any window is the difference of two of them.
 *
 * <p>An event in order costs O(1) amortised: it is appended, and the place where its window begins is next to where
 * the last one began. A late event is put in its place, O(log n) and a shift of what is younger.
 */
public final class WindowBuffer {
    long[] times;
    /** sums[i]: of all weights up to and with the i-th, and of everything that was dropped before. */
    long[] sums;

    int head;
    int tail;
    /** The sum of everything dropped. */
    long base;
    /** Where the last window of an event in order began. */
    private int low;

    public WindowBuffer() {
        this(8);
    }

    WindowBuffer(int capacity) {
        times = new long[capacity];
        sums = new long[capacity];
    }

    /** Drops what is older than `from`. */
    void evict(long from) {
        while (head < tail && times[head] < from) {
            base = sums[head++];
        }
        if (low < head) {
            low = head;
        }
    }

    void add(long time, long weight) {
        if (tail == times.length) {
            makeRoom();
        }
        if (head == tail || times[tail - 1] <= time) {
            times[tail] = time;
            sums[tail] = sumBefore(tail) + weight;
            tail++;
            return;
        }
        int at = firstFrom(time + 1);
        System.arraycopy(times, at, times, at + 1, tail - at);
        System.arraycopy(sums, at, sums, at + 1, tail - at);
        times[at] = time;
        sums[at] = sumBefore(at);
        tail++;
        for (int i = at; i < tail; i++) {
            sums[i] += weight;
        }
    }

    /** The sum of the weights in [end - window, end]. */
    long value(long end, long window) {
        if (head == tail) {
            return 0;
        }
        long start = end - window;
        if (times[tail - 1] > end) {
            return sumBefore(firstFrom(end + 1)) - sumBefore(firstFrom(start));
        }
        int i = low;
        while (i < tail && times[i] < start) {
            i++;
        }
        while (i > head && times[i - 1] >= start) {
            i--;
        }
        low = i;
        return sums[tail - 1] - sumBefore(i);
    }

    private long sumBefore(int at) {
        return at == head ? base : sums[at - 1];
    }

    /** The first place with a time of `time` or later. */
    private int firstFrom(long time) {
        int from = head;
        int to = tail;
        while (from < to) {
            int middle = (from + to) >>> 1;
            if (times[middle] < time) {
                from = middle + 1;
            } else {
                to = middle;
            }
        }
        return from;
    }

    private void makeRoom() {
        int count = tail - head;
        // At least a quarter of the room is free afterwards, so that moving stays O(1) amortised.
        if (count > times.length - (times.length >> 2)) {
            times = Arrays.copyOf(times, times.length * 2);
            sums = Arrays.copyOf(sums, times.length);
        }
        if (head > 0) {
            System.arraycopy(times, head, times, 0, count);
            System.arraycopy(sums, head, sums, 0, count);
            low -= head;
            head = 0;
            tail = count;
        }
    }
}
