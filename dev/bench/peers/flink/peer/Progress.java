package peer;

import java.lang.invoke.MethodHandles;
import java.lang.invoke.VarHandle;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.CountDownLatch;

/**
 * How far the judging subtasks are, for the clock of the main thread. Static: the cluster is embedded in its JVM.
 *
 * <p>A judgement is one event judged under one rule, so that a set of n events is through after n times the number of
 * rules. The rate is taken from these counts, not from what the source has emitted and nobody has judged yet.
 */
public final class Progress {
    private static final List<Mark> MARKS = new ArrayList<>();
    private static volatile CountDownLatch rulesToArrive = new CountDownLatch(0);

    private Progress() {}

    /** Called once by every judging subtask that starts. */
    public static Mark mark() {
        Mark mark = new Mark();
        synchronized (MARKS) {
            MARKS.add(mark);
        }
        return mark;
    }

    public static long judgements() {
        long sum = 0;
        synchronized (MARKS) {
            for (Mark mark : MARKS) {
                sum += (long) Mark.JUDGED.getOpaque(mark);
            }
        }
        return sum;
    }

    /** Of how many checkpoints a subtask was told, of the one that was told of most. */
    public static long checkpoints() {
        synchronized (MARKS) {
            return MARKS.stream().mapToLong(mark -> mark.completed).max().orElse(0);
        }
    }

    /** The event that each subtask judged last, of all or of those before the last checkpoint; null: none. */
    public static List<Long> lastEvents(boolean ofCheckpoint) {
        List<Long> last = new ArrayList<>();
        synchronized (MARKS) {
            for (Mark mark : MARKS) {
                last.add(ofCheckpoint ? mark.durable : mark.judged > 0 ? (Long) mark.lastEvent : null);
            }
        }
        return last;
    }

    /** The source waits for so many arrivals of a broadcast rule at a subtask, so that no event comes before a rule. */
    public static void expectRules(int arrivals) {
        rulesToArrive = new CountDownLatch(arrivals);
    }

    public static void ruleArrived() {
        rulesToArrive.countDown();
    }

    public static void awaitRules() throws InterruptedException {
        rulesToArrive.await();
    }

    /** The counters of one subtask. Written by its thread alone, read by the main thread. */
    public static final class Mark {
        private static final VarHandle JUDGED;

        static {
            try {
                JUDGED = MethodHandles.lookup().findVarHandle(Mark.class, "judged", long.class);
            } catch (ReflectiveOperationException error) {
                throw new ExceptionInInitializerError(error);
            }
        }

        private long judged;
        private long lastEvent;
        private final TreeMap<Long, Long> ofCheckpoints = new TreeMap<>();
        private volatile Long durable;
        private volatile long completed;

        /** A plain store for the processor: costs nothing beside a state access. */
        public void judged(long eventId) {
            lastEvent = eventId;
            JUDGED.setOpaque(this, judged + 1);
        }

        public void snapshot(long checkpoint) {
            if (judged > 0) {
                ofCheckpoints.put(checkpoint, lastEvent);
            }
        }

        public void completed(long checkpoint) {
            completed++;
            Map.Entry<Long, Long> latest = ofCheckpoints.floorEntry(checkpoint);
            if (latest != null) {
                durable = latest.getValue();
                ofCheckpoints.headMap(checkpoint, true).clear();
            }
        }
    }
}
