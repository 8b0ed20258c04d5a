package peer;

import java.util.ArrayList;
import java.util.List;
import org.apache.flink.api.connector.sink2.Sink;
import org.apache.flink.api.connector.sink2.SinkWriter;
import org.apache.flink.api.connector.sink2.WriterInitContext;

/**
 * The sink of runs that are not durable, as cheap as one can be whose alerts are compared afterwards: each writer
 * appends to a list of its own in this JVM, and the lists are written to a file after the clock has stopped.
 */
public final class MemorySink implements Sink<Alert> {
    private static final long serialVersionUID = 1L;
    private static final List<List<Alert>> LISTS = new ArrayList<>();

    /** Everything that was written, after the job has ended. */
    public static List<Alert> all() {
        synchronized (LISTS) {
            List<Alert> all = new ArrayList<>();
            LISTS.forEach(all::addAll);
            return all;
        }
    }

    @Override
    public SinkWriter<Alert> createWriter(WriterInitContext context) {
        List<Alert> alerts = new ArrayList<>();
        synchronized (LISTS) {
            LISTS.add(alerts);
        }
        return new SinkWriter<Alert>() {
            @Override
            public void write(Alert alert, Context where) {
                alerts.add(alert);
            }

            @Override
            public void flush(boolean endOfInput) {}

            @Override
            public void close() {}
        };
    }
}
