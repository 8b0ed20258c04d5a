package peer.demo;

import java.math.BigDecimal;
import java.util.HashSet;
import java.util.Iterator;
import java.util.Map;
import java.util.Set;
import org.apache.flink.api.common.functions.OpenContext;
import org.apache.flink.api.common.state.BroadcastState;
import org.apache.flink.api.common.state.CheckpointListener;
import org.apache.flink.api.common.state.MapState;
import org.apache.flink.api.common.state.MapStateDescriptor;
import org.apache.flink.api.common.typeinfo.TypeHint;
import org.apache.flink.api.common.typeinfo.TypeInformation;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.runtime.state.FunctionInitializationContext;
import org.apache.flink.runtime.state.FunctionSnapshotContext;
import org.apache.flink.streaming.api.checkpoint.CheckpointedFunction;
import org.apache.flink.streaming.api.functions.co.KeyedBroadcastProcessFunction;
import org.apache.flink.util.Collector;
import peer.Alert;
import peer.Progress;
import peer.Rule;

/**
 * Judges events under rules that come as a broadcast stream: all events of a key in a map from their time, gone
 * through from end to end for each event.
 *
 * <p>Where the pattern can be read in more than one way, the way that suits Flink is taken: one iteration over entries
 * where one over keys with a look-up each would do, fields read directly, built-in serializers for the sets, no output
 * beside the alerts.
 */
public final class DynamicAlertFunction extends KeyedBroadcastProcessFunction<String, Keyed, Rule, Alert>
        implements CheckpointedFunction, CheckpointListener {
    private static final long serialVersionUID = 1L;

    /** Under this name the broadcast state has the rule of the widest window, which says how long events are kept. */
    private static final String WIDEST = "";

    public static final MapStateDescriptor<String, Rule> RULES =
            new MapStateDescriptor<>("rules", Types.STRING, Types.POJO(Rule.class));

    private transient MapState<Long, Set<DemoEvent>> windowState;
    private transient Progress.Mark mark;

    @Override
    public void open(OpenContext context) {
        windowState = getRuntimeContext()
                .getMapState(new MapStateDescriptor<>(
                        "window", Types.LONG, TypeInformation.of(new TypeHint<Set<DemoEvent>>() {})));
        mark = Progress.mark();
    }

    @Override
    public void processElement(Keyed keyed, ReadOnlyContext context, Collector<Alert> out) throws Exception {
        DemoEvent event = keyed.event;
        long end = event.eventTime;
        Set<DemoEvent> sameTime = windowState.get(end);
        if (sameTime == null) {
            sameTime = new HashSet<>();
        }
        sameTime.add(event);
        windowState.put(end, sameTime);

        Rule rule = context.getBroadcastState(RULES).get(keyed.ruleId);
        long start = end - rule.windowUs;
        // Whole seconds, so that events of one second and key share a timer.
        context.timerService().registerEventTimeTimer(Math.floorDiv(end, 1_000_000L) * 1_000L);

        boolean sums = rule.sums();
        BigDecimal least = sums ? null : BigDecimal.valueOf(rule.minAmountCents, 2);
        BigDecimal value = BigDecimal.ZERO;
        for (Map.Entry<Long, Set<DemoEvent>> entry : windowState.entries()) {
            long time = entry.getKey();
            if (time < start || time > end) {
                continue;
            }
            for (DemoEvent each : entry.getValue()) {
                if (sums) {
                    value = value.add(each.amount);
                } else if (each.amount.compareTo(least) >= 0) {
                    value = value.add(BigDecimal.ONE);
                }
            }
        }
        long result = sums ? value.movePointRight(2).longValueExact() : value.longValueExact();
        if (result >= rule.atLeast) {
            out.collect(new Alert(rule.ruleId, event.eventId, result));
        }
        mark.judged(event.eventId);
    }

    @Override
    public void processBroadcastElement(Rule rule, Context context, Collector<Alert> out) throws Exception {
        BroadcastState<String, Rule> rules = context.getBroadcastState(RULES);
        rules.put(rule.ruleId, rule);
        Rule widest = rules.get(WIDEST);
        if (widest == null || widest.windowUs < rule.windowUs) {
            rules.put(WIDEST, rule);
        }
        Progress.ruleArrived();
    }

    @Override
    public void onTimer(long timestamp, OnTimerContext context, Collector<Alert> out) throws Exception {
        long keptFrom =
                timestamp * 1_000L - context.getBroadcastState(RULES).get(WIDEST).windowUs - Rule.LATENESS_US;
        Iterator<Long> times = windowState.keys().iterator();
        while (times.hasNext()) {
            if (times.next() < keptFrom) {
                times.remove();
            }
        }
    }

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
