package peer.tuned;

import org.apache.flink.api.common.functions.OpenContext;
import org.apache.flink.api.common.state.ValueState;
import org.apache.flink.api.common.state.ValueStateDescriptor;
import peer.Rule;

/** For the heap backend: one buffer per key, changed in place. */
public final class HeapJudge extends Judge {
    private static final long serialVersionUID = 1L;

    private transient ValueState<WindowBuffer> state;

    public HeapJudge(Rule rule) {
        super(rule);
    }

    @Override
    public void open(OpenContext context) throws Exception {
        super.open(context);
        state = getRuntimeContext()
                .getState(new ValueStateDescriptor<>("window", WindowBufferSerializer.INSTANCE));
    }

    @Override
    long value(long time, boolean counts, int weight, long keptFrom) throws Exception {
        // The heap backend hands out the object that it keeps, copied before if a running checkpoint still needs it.
        WindowBuffer buffer = state.value();
        if (buffer == null) {
            if (!counts) {
                return 0;
            }
            buffer = new WindowBuffer();
            state.update(buffer);
        }
        buffer.evict(keptFrom);
        if (counts) {
            buffer.add(time, weight);
        }
        return buffer.value(time, window);
    }
}
