package peer;

import java.io.BufferedInputStream;
import java.io.BufferedWriter;
import java.io.DataInputStream;
import java.io.File;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.Paths;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import java.util.stream.Collectors;
import java.util.stream.Stream;
import org.apache.flink.api.common.JobID;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.serialization.Encoder;
import org.apache.flink.api.common.typeinfo.TypeInformation;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.connector.file.sink.FileSink;
import org.apache.flink.connector.file.src.FileSource;
import org.apache.flink.runtime.jobmaster.JobResult;
import org.apache.flink.runtime.minicluster.MiniCluster;
import org.apache.flink.runtime.minicluster.MiniClusterConfiguration;
import org.apache.flink.shaded.jackson2.com.fasterxml.jackson.databind.ObjectMapper;
import org.apache.flink.streaming.api.datastream.BroadcastStream;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.streaming.api.functions.sink.filesystem.rollingpolicies.OnCheckpointRollingPolicy;
import org.apache.flink.streaming.api.graph.StreamGraph;
import peer.demo.DemoEvent;
import peer.demo.DynamicAlertFunction;
import peer.demo.DynamicKeyFunction;
import peer.demo.Keyed;
import peer.tuned.Event;
import peer.tuned.EventSerializer;
import peer.tuned.FixedType;
import peer.tuned.HeapJudge;
import peer.tuned.RocksJudge;

/**
 * Runs one variant on one set in a cluster inside this JVM, writes the alerts and prints one line of JSON.
 *
 * <p>The clock runs from the submission of the job to its end: the cluster is up before, the alerts of a run that is
 * not durable are written after. The last checkpoint and the commit of the last files are within.
 */
public final class Peer {
    private static final int PARALLELISM = 2;
    private static final Duration OUT_OF_ORDERNESS = Duration.ofSeconds(10);
    private static final String CHECKPOINT_INTERVAL = "1 s";

    private final boolean demo;
    private final boolean rocksdb;
    private final boolean durable;
    private final Path input;
    private final Path alerts;
    private final Path work;
    private final double limitSeconds;
    private final List<Rule> rules;
    private final Configuration configuration;

    private Peer(Map<String, String> options) throws IOException {
        demo = options.get("variant").startsWith("demo-");
        rocksdb = options.get("variant").endsWith("-rocksdb");
        durable = Boolean.parseBoolean(options.get("durable"));
        input = Paths.get(options.get("input"));
        alerts = Paths.get(options.get("alerts"));
        work = Paths.get(options.get("work"));
        limitSeconds = Double.parseDouble(options.getOrDefault("limit-seconds", "Infinity"));
        rules = Rule.read(new File(options.get("rules")));
        configuration = configure(options);
    }

    /** Options: key=value each; keys that Flink knows (with a dot) go to its configuration. */
    public static void main(String[] arguments) throws Exception {
        Map<String, String> options = new LinkedHashMap<>();
        for (String argument : arguments) {
            int equals = argument.indexOf('=');
            options.put(argument.substring(0, equals), argument.substring(equals + 1));
        }
        System.out.println(new ObjectMapper().writeValueAsString(new Peer(options).run()));
        System.out.flush();
        // Threads of the cluster that are slow to end hold nobody up.
        Runtime.getRuntime().halt(0);
    }

    private Configuration configure(Map<String, String> options) {
        Configuration set = new Configuration();
        set.setString("execution.runtime-mode", "STREAMING");
        set.setString("parallelism.default", String.valueOf(PARALLELISM));
        set.setString("pipeline.object-reuse", String.valueOf(!demo));
        set.setString("restart-strategy.type", "none");
        set.setString("io.tmp.dirs", work.resolve("tmp").toString());
        set.setString("taskmanager.memory.network.min", "128m");
        set.setString("taskmanager.memory.network.max", "128m");
        set.setString("state.backend.type", rocksdb ? "rocksdb" : "hashmap");
        if (rocksdb) {
            // Shared by the two slots, outside of the heap: block cache and write buffers.
            set.setString("taskmanager.memory.managed.size", "2g");
            set.setString("execution.checkpointing.incremental", "true");
            set.setString("state.backend.rocksdb.use-bloom-filter", "true");
            if (!demo) {
                // Every event writes a new version of its tail: a smaller write buffer is quicker to search.
                set.setString("state.backend.rocksdb.writebuffer.size", "16mb");
            }
        }
        if (durable) {
            set.setString("execution.checkpointing.mode", "EXACTLY_ONCE");
            set.setString("execution.checkpointing.interval", CHECKPOINT_INTERVAL);
            set.setString("execution.checkpointing.storage", "filesystem");
            set.setString("execution.checkpointing.dir", work.resolve("checkpoints").toUri().toString());
            // Fewer bytes on the way where judging is slow, so that a checkpoint need not wait for them.
            set.setString("taskmanager.network.memory.buffer-debloat.enabled", "true");
        }
        options.forEach((key, value) -> {
            if (key.indexOf('.') >= 0) {
                set.setString(key, value);
            }
        });
        return set;
    }

    private Map<String, Object> run() throws Exception {
        StreamExecutionEnvironment environment = StreamExecutionEnvironment.getExecutionEnvironment(configuration);
        if (demo) {
            buildDemo(environment);
        } else {
            buildTuned(environment);
        }
        StreamGraph graph = environment.getStreamGraph();
        graph.setJobName("peer");
        long total = Files.size(input) / RecordFormat.RECORD_BYTES;

        MiniClusterConfiguration cluster = new MiniClusterConfiguration.Builder()
                .setConfiguration(configuration)
                .setNumTaskManagers(1)
                .setNumSlotsPerTaskManager(PARALLELISM)
                .withRandomPorts()
                .build();
        Clock clock = new Clock(total, rules.size());
        List<Alert> found;
        boolean complete;
        try (MiniCluster mini = new MiniCluster(cluster)) {
            mini.start();
            clock.start();
            JobID job = mini.submitJob(graph.getJobGraph()).get().getJobID();
            CompletableFuture<JobResult> result = mini.requestJobResult(job);
            complete = clock.follow(result, limitSeconds);
            if (!complete) {
                mini.cancelJob(job).get();
            }
            JobResult end = result.get();
            clock.stop();
            if (complete && end.getSerializedThrowable().isPresent()) {
                throw new IOException("the job failed", end.getSerializedThrowable().get());
            }
            found = durable ? writtenAlerts() : MemorySink.all();
        }
        long events = total;
        if (!complete) {
            Map<Long, Long> prefix = judgedPrefix();
            events = prefix.size();
            found = found.stream().filter(alert -> prefix.containsKey(alert.eventId)).collect(Collectors.toList());
        }
        try (BufferedWriter writer = Files.newBufferedWriter(alerts)) {
            for (Alert alert : found) {
                writer.write(alert.line());
                writer.write('\n');
            }
        }
        Map<String, Object> outcome = new LinkedHashMap<>();
        outcome.put("durable", durable);
        outcome.put("events", events);
        outcome.put("seconds", clock.seconds());
        outcome.put("steady_events_per_s", clock.steadyRate());
        outcome.put("alerts", found.size());
        outcome.put("complete", complete);
        Map<String, Object> settings = new LinkedHashMap<>();
        settings.put("java", System.getProperty("java.version"));
        settings.put("max_heap_bytes", Runtime.getRuntime().maxMemory());
        settings.put("checkpoints", durable ? "every " + CHECKPOINT_INTERVAL + ", exactly once" : "none");
        settings.put("checkpoints_completed", Progress.checkpoints());
        settings.put("sink", durable ? "FileSink, rolled on checkpoint" : "in memory, written after the end");
        settings.put("steady", "counted at the judging operators, from a quarter of the judgements to the last");
        settings.put("serializers", demo ? "POJO and built-in collections" : "own, of fixed layout");
        Map<String, String> ours = new LinkedHashMap<>(configuration.toMap());
        ours.values().removeIf(value -> value.contains(work.toString()));
        settings.put("flink", ours);
        outcome.put("settings", settings);
        return outcome;
    }

    private void buildDemo(StreamExecutionEnvironment environment) {
        TypeInformation<DemoEvent> type = Types.POJO(DemoEvent.class);
        // Each rule reaches the key function and both subtasks of the alert function before the first event is read.
        Progress.expectRules(rules.size() * (1 + PARALLELISM));
        DataStream<Rule> changes = environment.fromData(rules, Types.POJO(Rule.class));
        BroadcastStream<Rule> forKeys = changes.broadcast(DynamicKeyFunction.RULES);
        BroadcastStream<Rule> forAlerts = changes.broadcast(DynamicAlertFunction.RULES);
        DataStream<Alert> found = source(environment, new RecordFormat<>(DemoEvent::decode, type), e -> e.eventTime)
                .connect(forKeys)
                .process(new DynamicKeyFunction())
                .returns(Types.POJO(Keyed.class))
                // As the source: two would let events of a key overtake each other.
                .setParallelism(1)
                .keyBy(Keyed::getKey)
                .connect(forAlerts)
                .process(new DynamicAlertFunction())
                .returns(Types.POJO(Alert.class));
        addSink(found, "alerts");
    }

    private void buildTuned(StreamExecutionEnvironment environment) {
        TypeInformation<Event> type = new FixedType<>(Event.class, EventSerializer.INSTANCE);
        DataStream<Event> events =
                source(environment, new RecordFormat<>(new Event.Decoder(), type), event -> event.eventTime);
        for (Rule rule : rules) {
            DataStream<Alert> found = (rule.byCustomer()
                            ? events.keyBy(event -> event.customerId, Types.INT)
                            : events.keyBy(event -> event.terminalId, Types.INT))
                    .process(rocksdb ? new RocksJudge(rule) : new HeapJudge(rule))
                    .returns(Types.POJO(Alert.class));
            addSink(found, rule.ruleId);
        }
    }

    /** Reads an event's time in microseconds. */
    private interface TimeOf<T> extends java.io.Serializable {
        long of(T event);
    }

    private <T> DataStream<T> source(
            StreamExecutionEnvironment environment, RecordFormat<T> format, TimeOf<T> timeOf) {
        FileSource<T> source = FileSource.forBulkFileFormat(
                        format, new org.apache.flink.core.fs.Path(input.toAbsolutePath().toUri()))
                .build();
        WatermarkStrategy<T> watermarks = WatermarkStrategy.<T>forBoundedOutOfOrderness(OUT_OF_ORDERNESS)
                .withTimestampAssigner((event, before) -> Math.floorDiv(timeOf.of(event), 1_000L));
        // One reader: the order of arrival is the order of the file.
        return environment
                .fromSource(source, watermarks, "records", format.getProducedType())
                .setParallelism(1);
    }

    private void addSink(DataStream<Alert> found, String name) {
        if (!durable) {
            found.sinkTo(new MemorySink());
            return;
        }
        Encoder<Alert> encoder = (alert, stream) ->
                stream.write((alert.line() + '\n').getBytes(StandardCharsets.US_ASCII));
        found.sinkTo(FileSink.forRowFormat(
                        new org.apache.flink.core.fs.Path(
                                work.resolve("alerts").resolve(name).toUri()),
                        encoder)
                .withRollingPolicy(OnCheckpointRollingPolicy.build())
                .build());
    }

    /**
     * The alerts in all files of the sinks, committed or not: a job that was stopped may have left files that belong to
     * its last checkpoint uncommitted, and what goes beyond it does not belong to the judged prefix.
     */
    private List<Alert> writtenAlerts() throws IOException {
        List<Alert> found = new ArrayList<>();
        List<Path> files;
        try (Stream<Path> walk = Files.walk(work.resolve("alerts"))) {
            files = walk.filter(Files::isRegularFile).collect(Collectors.toList());
        }
        for (Path file : files) {
            String text = Files.readString(file, StandardCharsets.US_ASCII);
            int from = 0;
            // A last line without an end was being written.
            for (int to = text.indexOf('\n'); to >= 0; to = text.indexOf('\n', from)) {
                String[] fields = text.substring(from, to).split(",");
                found.add(new Alert(fields[0], Long.parseLong(fields[1]), Long.parseLong(fields[2])));
                from = to + 1;
            }
        }
        return found;
    }

    /**
     * The ids of the events, from the first of the file on, that have been judged under every rule. Each subtask judges
     * in the order of the file, so these are the events before the earliest of those that a subtask judged last; of a
     * durable run, judged last before a completed checkpoint.
     */
    private Map<Long, Long> judgedPrefix() throws IOException {
        List<Long> last = Progress.lastEvents(durable);
        Map<Long, Long> prefix = new HashMap<>();
        if (last.isEmpty() || last.contains(null)) {
            return prefix;
        }
        Set<Long> ends = new HashSet<>(last);
        try (DataInputStream stream = new DataInputStream(new BufferedInputStream(Files.newInputStream(input)))) {
            ByteBuffer record = ByteBuffer.allocate(RecordFormat.RECORD_BYTES).order(ByteOrder.LITTLE_ENDIAN);
            while (stream.readNBytes(record.array(), 0, record.capacity()) == record.capacity()) {
                long eventId = record.getLong(0);
                if (ends.contains(eventId)) {
                    break;
                }
                prefix.put(eventId, eventId);
            }
        }
        return prefix;
    }

    /** Samples the judgements every few milliseconds. */
    private static final class Clock {
        private static final long SAMPLE_MS = 10;
        private static final long PROGRESS_NS = 5_000_000_000L;

        private final long expected;
        private final int rules;
        private final List<long[]> samples = new ArrayList<>();
        private long start;
        private long end;

        Clock(long events, int rules) {
            this.expected = events * rules;
            this.rules = rules;
        }

        void start() {
            start = System.nanoTime();
        }

        void stop() {
            end = System.nanoTime();
            sample();
        }

        private long sample() {
            long judged = Progress.judgements();
            if (samples.isEmpty() || samples.get(samples.size() - 1)[1] != judged) {
                samples.add(new long[] {System.nanoTime(), judged});
            }
            return judged;
        }

        /** Waits for the end of the job. Returns whether it came before the limit. */
        boolean follow(CompletableFuture<JobResult> result, double limitSeconds) throws Exception {
            long told = start;
            while (true) {
                try {
                    result.get(SAMPLE_MS, TimeUnit.MILLISECONDS);
                    return true;
                } catch (TimeoutException waiting) {
                    long judged = sample();
                    long now = System.nanoTime();
                    if (now - told >= PROGRESS_NS) {
                        told = now;
                        double passed = (now - start) / 1e9;
                        System.err.printf(
                                "flink: %.0f s, %d of %d events%n", passed, judged / rules, expected / rules);
                    }
                    if ((now - start) / 1e9 >= limitSeconds) {
                        return false;
                    }
                }
            }
        }

        double seconds() {
            return (end - start) / 1e9;
        }

        /** Events a second from a quarter of all judgements to the last one. */
        double steadyRate() {
            long[] last = samples.get(samples.size() - 1);
            for (long[] sample : samples) {
                if (sample[1] * 4 >= last[1] && sample[0] < last[0]) {
                    return (last[1] - sample[1]) / (double) rules / ((last[0] - sample[0]) / 1e9);
                }
            }
            return 0;
        }
    }
}
