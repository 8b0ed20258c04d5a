package peer.demo;

import java.util.Map;
import org.apache.flink.api.common.state.MapStateDescriptor;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.streaming.api.functions.co.BroadcastProcessFunction;
import org.apache.flink.util.Collector;
import peer.Progress;
import peer.Rule;

/** Sends each event to every rule under that rule's key, which is known only when the rule arrives. */
public final class DynamicKeyFunction extends BroadcastProcessFunction<DemoEvent, Rule, Keyed> {
    private static final long serialVersionUID = 1L;

    public static final MapStateDescriptor<String, Rule> RULES =
            new MapStateDescriptor<>("rules", Types.STRING, Types.POJO(Rule.class));

    @Override
    public void processElement(DemoEvent event, ReadOnlyContext context, Collector<Keyed> out) throws Exception {
        for (Map.Entry<String, Rule> entry : context.getBroadcastState(RULES).immutableEntries()) {
            Rule rule = entry.getValue();
            int id = rule.byCustomer() ? event.customerId : event.terminalId;
            out.collect(new Keyed(event, "{" + rule.groupBy + "=" + id + "}", rule.ruleId));
        }
    }

    @Override
    public void processBroadcastElement(Rule rule, Context context, Collector<Keyed> out) throws Exception {
        context.getBroadcastState(RULES).put(rule.ruleId, rule);
        Progress.ruleArrived();
    }
}
