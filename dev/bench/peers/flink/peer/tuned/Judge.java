package peer.tuned;

import org.apache.flink.api.common.functions.OpenContext;
import org.apache.flink.api.common.state.CheckpointListener;
import org.apache.flink.runtime.state.FunctionInitializationContext;
import org.apache.flink.runtime.state.FunctionSnapshotContext;
import org.apache.flink.streaming.api.checkpoint.CheckpointedFunction;
import org.apache.flink.streaming.api.functions.KeyedProcessFunction;
import org.apache.flink.util.Collector;
import peer.Alert;
import peer.Progress;
import peer.Rule;

/**
 * Judges the events of its keys under one rule. How events are kept is up to the subclass.
 *
 * <p>What is too old is dropped when its key is touched. There are no timers: in these sets every key comes back, and a
 * timer per key would only cost.
 */
abstract class Judge extends KeyedProcessFunction<Integer, Event, Alert>
        implements CheckpointedFunction, CheckpointListener {
    private static final long serialVersionUID = 1L;

    private final String ruleId;
    private final long atLeast;
    private final boolean sums;
    private final long minAmount;
    final long window;
    private transient Progress.Mark mark;

    Judge(Rule rule) {
        ruleId = rule.ruleId;
        atLeast = rule.atLeast;
        sums = rule.sums();
        minAmount = rule.minAmountCents;
        window = rule.windowUs;
    }

    @Override
    public void open(OpenContext context) throws Exception {
        mark = Progress.mark();
    }

    @Override
    public final void processElement(Event event, Context context, Collector<Alert> out) throws Exception {
        long watermark = context.timerService().currentWatermark();
        long keptFrom = watermark == Long.MIN_VALUE ? watermark : watermark * 1_000L - window - Rule.LATENESS_US;
        boolean counts = sums || event.amountCents >= minAmount;
        long value = value(event.eventTime, counts, sums ? event.amountCents : 1, keptFrom);
        if (value >= atLeast) {
            out.collect(new Alert(ruleId, event.eventId, value));
        }
        mark.judged(event.eventId);
    }

    /**
     * Takes in an event of the current key and values the window that ends at it.
     *
     * @param counts whether the event itself counts: what does not count is judged and not kept
     * @param keptFrom what is older (microseconds) is needed no more
     */
    abstract long value(long time, boolean counts, int weight, long keptFrom) throws Exception;

    @Override
    public void snapshotState(FunctionSnapshotContext context) {
        mark.snapshot(context.getCheckpointId());
    }

    @Override
    public void initializeState(FunctionInitializationContext context) {}

    @Override
    public void notifyCheckpointComplete(long checkpoint) {
        mark.completed(checkpoint);
    }
}
