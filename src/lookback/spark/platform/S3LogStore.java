package lookback;

import java.io.BufferedReader;
import java.io.ByteArrayInputStream;
import java.io.FileNotFoundException;
import java.io.IOException;
import java.io.InputStream;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.nio.file.FileAlreadyExistsException;
import java.util.Collections;
import java.util.Iterator;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.TreeMap;
import java.util.UUID;
import java.util.concurrent.Callable;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.FutureTask;
import java.util.concurrent.ThreadFactory;
import java.util.concurrent.TimeUnit;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

import io.delta.storage.CloseableIterator;
import io.delta.storage.LineCloseableIterator;
import io.delta.storage.S3SingleDriverLogStore;
import org.apache.commons.io.IOUtils;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FileStatus;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.FutureDataInputStreamBuilder;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.util.functional.FutureIO;
import org.apache.hadoop.fs.s3a.S3AFileStatus;
import org.apache.hadoop.fs.s3a.S3AFileSystem;
import org.apache.hadoop.fs.s3a.S3AUtils;
import software.amazon.awssdk.core.exception.SdkException;
import software.amazon.awssdk.services.s3.S3Client;
import software.amazon.awssdk.services.s3.model.ListObjectsV2Request;
import software.amazon.awssdk.services.s3.model.ListObjectsV2Response;
import software.amazon.awssdk.services.s3.model.S3Object;

/**
 * Delta's log store for S3 with any number of writers: a commit is one PUT with `If-None-Match: *`, so the store itself
 * lets one of two commits win.
 */
public class S3LogStore extends S3SingleDriverLogStore {

    // The names of buckets of S3 Express, which list in no order, end with this.
    private static final String UNORDERED_BUCKET = "--x-s3";

    // Files that never change.
    private static final Pattern COMMIT = Pattern.compile("([0-9]{20})\\.(json|crc)");
    private static final Pattern VERSION = Pattern.compile("[0-9]{20}");
    // The files as they were listed last, by their paths, and the contents of the short ones that were read.
    private static final int MAX_LISTED = 10000;
    private static final int MAX_CONTENTS = 200;
    private static final int MAX_CONTENT_BYTES = 65536;
    private static final Map LISTED = makeCache(MAX_LISTED);
    private static final Map CONTENTS = makeCache(MAX_CONTENTS);
    // How old a list may be for a stream, and what it has listed of each log it follows; see `Followed`.
    private static final String MAX_AGE = "fs.lookback.max.list.age";
    private static final int MAX_LOGS = 100;
    private static final int RECENT_VERSIONS = 10;
    private static final long MAX_OLD_AGE_NANOS = 60L * 1000 * 1000 * 1000;
    private static final Map LOGS = makeCache(MAX_LOGS);
    // Who reads a commit reads the next ones: with 30 ms a request, eight commits take 40 ms instead of 300.
    private static final int COMMITS_AHEAD = 8;
    private static final ExecutorService READERS = Executors.newFixedThreadPool(COMMITS_AHEAD, new Daemons());

    public S3LogStore(Configuration conf) {
        super(conf);
    }

    /**
     * Reads a commit or its sum with one request if it was listed, and with none if it was read before: Delta reads the
     * last commits of a log several times in a batch. A commit never changes. If another table comes to be in the place
     * of one, the next listing shows other files.
     */
    public CloseableIterator<String> read(Path path, Configuration conf) throws IOException {
        FileStatus listed = (FileStatus) LISTED.get(path.toString());
        if (listed == null) {
            return super.read(path, conf);
        }
        FileSystem files = path.getFileSystem(conf);
        if (listed.getLen() > MAX_CONTENT_BYTES) {
            return iterate(open(listed, files));
        }
        Matcher commit = COMMIT.matcher(path.getName());
        if (commit.matches() && commit.group(2).equals("json")) {
            long version = Long.parseLong(commit.group(1));
            for (int at = 1; at <= COMMITS_AHEAD; at++) {
                Object next = LISTED.get(new Path(path.getParent(), nameVersion(version + at) + ".json").toString());
                if (next != null && ((FileStatus) next).getLen() <= MAX_CONTENT_BYTES) {
                    FutureTask task = getTask((FileStatus) next, files);
                    if (!task.isDone()) {
                        READERS.execute(task);
                    }
                }
            }
        }
        FutureTask task = getTask(listed, files);
        task.run();
        return iterate(new ByteArrayInputStream((byte[]) FutureIO.awaitFuture((Future) task)));
    }

    /** Returns what reads a file, or has read it. */
    private static FutureTask getTask(final FileStatus listed, final FileSystem files) {
        synchronized (CONTENTS) {
            FutureTask task = (FutureTask) CONTENTS.get(nameContent(listed));
            if (task == null) {
                task = new FutureTask(new Callable() {
                    public Object call() throws IOException {
                        byte[] content = null;
                        try {
                            InputStream stream = open(listed, files);
                            try {
                                content = IOUtils.toByteArray(stream);
                            } finally {
                                stream.close();
                            }
                        } finally {
                            // What failed is tried anew by the next one who reads it.
                            if (content == null) {
                                CONTENTS.remove(nameContent(listed));
                            }
                        }
                        return content;
                    }
                });
                CONTENTS.put(nameContent(listed), task);
            }
            return task;
        }
    }

    private static String nameContent(FileStatus listed) {
        return listed.getPath() + "#" + ((S3AFileStatus) listed).getETag();
    }

    private static String nameVersion(long version) {
        return String.format("%020d", new Object[] {Long.valueOf(version)});
    }

    private static InputStream open(FileStatus listed, FileSystem files) throws IOException {
        FutureDataInputStreamBuilder builder = files.openFile(listed.getPath());
        builder.opt("fs.option.openfile.read.policy", "whole-file");
        // S3A asks for the length and the tag of a file unless it is told.
        builder.withFileStatus(listed);
        return (InputStream) FutureIO.awaitFuture((Future) builder.build());
    }

    private static CloseableIterator<String> iterate(InputStream stream) {
        return new LineCloseableIterator(new BufferedReader(new InputStreamReader(stream, StandardCharsets.UTF_8)));
    }

    private static Map makeCache(final int size) {
        return Collections.synchronizedMap(new LinkedHashMap(16, 0.75f, true) {
            protected boolean removeEldestEntry(Map.Entry eldest) {
                return size() > size;
            }
        });
    }

    /** Lets the JVM end. */
    private static class Daemons implements ThreadFactory {
        public Thread newThread(Runnable task) {
            Thread thread = new Thread(task, "log reader");
            thread.setDaemon(true);
            return thread;
        }
    }

    public void write(Path path, Iterator<String> actions, Boolean overwrite, Configuration conf) throws IOException {
        // A commit has an id of its own, so that no other one is equal to it.
        S3File file = new S3File(path.getFileSystem(conf), path, overwrite.booleanValue());
        try {
            while (actions.hasNext()) {
                file.write((((String) actions.next()) + "\n").getBytes(StandardCharsets.UTF_8));
            }
        } catch (RuntimeException error) {
            file.abort();
            throw error;
        }
        file.close();
    }

    /** Lists the files of a log from `path` on. A stream, which sets `MAX_AGE`, remembers what it has listed. */
    public Iterator<FileStatus> listFrom(Path path, Configuration conf) throws IOException {
        S3AFileSystem files = (S3AFileSystem) path.getFileSystem(conf);
        Path folder = files.makeQualified(path).getParent();
        // VACUUM lists the folders of data too, from the name NUL, and needs their folders.
        if (files.getBucket().endsWith(UNORDERED_BUCKET) || !folder.getName().equals("_delta_log")) {
            return super.listFrom(path, conf);
        }
        long maxAge = conf.getTimeDuration(MAX_AGE, 0L, TimeUnit.NANOSECONDS);
        if (maxAge == 0) {
            return list(files, folder, path.getName()).values().iterator();
        }
        Followed log;
        synchronized (LOGS) {
            log = (Followed) LOGS.get(folder.toString());
            if (log == null) {
                log = new Followed(folder);
                LOGS.put(folder.toString(), log);
            }
        }
        return log.list(files, path.getName(), maxAge);
    }

    /** Forgets what streams have listed, so that one that starts now sees all that was committed before. */
    public static void forgetLists() {
        LOGS.clear();
    }

    /** Lists the files of a log from a name on; without its older files, whose number grows. */
    private static TreeMap<String, FileStatus> list(S3AFileSystem files, Path folder, String name) throws IOException {
        String prefix = files.pathToKey(folder) + "/";
        ListObjectsV2Request.Builder request = ListObjectsV2Request.builder()
            .bucket(files.getBucket()).prefix(prefix).delimiter("/").startAfter(prefix + nameBefore(name));
        S3Client client = files.getS3AInternals().getAmazonS3Client("list a log");
        TreeMap<String, FileStatus> found = new TreeMap<String, FileStatus>();
        try {
            ListObjectsV2Response page;
            String token = null;
            boolean isEmpty = true;
            do {
                page = client.listObjectsV2((ListObjectsV2Request) request.continuationToken(token).build());
                isEmpty &= page.contents().isEmpty();
                for (Object each : page.contents()) {
                    S3Object object = (S3Object) each;
                    String key = object.key().substring(prefix.length());
                    if (key.compareTo(name) >= 0) {
                        Path file = new Path(folder, key);
                        FileStatus status = new S3AFileStatus(
                            object.size().longValue(), object.lastModified().toEpochMilli(), file,
                            files.getDefaultBlockSize(folder), null, object.eTag(), null
                        );
                        found.put(key, status);
                        if (COMMIT.matcher(key).matches()) {
                            LISTED.put(file.toString(), status);
                        }
                    }
                }
                token = page.nextContinuationToken();
            } while (token != null);
            if (isEmpty && client.listObjectsV2(
                (ListObjectsV2Request) ListObjectsV2Request.builder()
                    .bucket(files.getBucket()).prefix(prefix).maxKeys(Integer.valueOf(1)).build()
            ).contents().isEmpty()) {
                throw new FileNotFoundException("No such file or directory: " + folder);
            }
        } catch (SdkException error) {
            throw S3AUtils.translateException("list", folder, error);
        }
        return found;
    }

    /**
     * A log that a stream follows. In a batch of several commits Delta lists it six times, the last 1,000 commits among
     * them. So a request is sent only for what is new, or after `maxAge`, and it lists the newest versions. The others are
     * remembered for a minute, as long as the newest commit is still there: the log is the same one then, and its commits
     * never change. A checkpoint that another process adds late is missing for that minute; Delta takes the one before.
     */
    private static class Followed {

        private final Path folder;
        private TreeMap<String, FileStatus> known = new TreeMap<String, FileStatus>();
        // The name from which `known` has all files, and the version of the newest commit.
        private String first;
        private long newest = -1;
        // When the log was listed last, and when from `first` on.
        private long listed;
        private long listedWhole;

        Followed(Path folder) {
            this.folder = folder;
        }

        synchronized Iterator<FileStatus> list(S3AFileSystem files, String name, long maxAge) throws IOException {
            long now = System.nanoTime();
            boolean reaches = newest >= 0 && first.compareTo(name) <= 0 && now - listedWhole < MAX_OLD_AGE_NANOS;
            if (!reaches || name.compareTo(nameVersion(newest)) >= 0 || now - listed > maxAge) {
                TreeMap<String, FileStatus> found = reaches ? listAgain(files) : null;
                if (found == null) {
                    found = S3LogStore.list(files, folder, name);
                    first = name;
                    listedWhole = now;
                }
                known = found;
                listed = now;
                newest = findNewest();
            }
            return known.tailMap(name).values().iterator();
        }

        /** Lists the newest versions and adds the others, or returns null if another log is in the place of this one. */
        private TreeMap<String, FileStatus> listAgain(S3AFileSystem files) throws IOException {
            String tail = nameVersion(Math.max(0L, newest - RECENT_VERSIONS));
            tail = tail.compareTo(first) < 0 ? first : tail;
            TreeMap<String, FileStatus> found = S3LogStore.list(files, folder, tail);
            if (!isSame(found)) {
                return null;
            }
            found.putAll(known.headMap(tail));
            return found;
        }

        /** Returns whether the log is still the one that was listed: another one has other commits. */
        private boolean isSame(TreeMap<String, FileStatus> found) {
            String name = nameVersion(newest) + ".json";
            FileStatus now = (FileStatus) found.get(name);
            return now != null && ((S3AFileStatus) now).getETag().equals(((S3AFileStatus) known.get(name)).getETag());
        }

        private long findNewest() {
            for (String name : known.descendingKeySet()) {
                Matcher commit = COMMIT.matcher(name);
                if (commit.matches() && commit.group(2).equals("json")) {
                    return Long.parseLong(commit.group(1));
                }
            }
            return -1;
        }
    }

    /**
     * Returns a name to list after, as `startAfter` leaves out the name itself. It is before the version before: so the
     * answer for the next version shows that the log is there, and no second request has to.
     */
    private static String nameBefore(String name) {
        if (VERSION.matcher(name).lookingAt()) {
            long version = Long.parseLong(name.substring(0, 20));
            return version > 0 ? nameVersion(version - 1) : "";
        }
        int last = name.length() - 1;
        return name.substring(0, last) + (char) (name.charAt(last) - 1);
    }

    /**
     * Asks the store itself, as one that does not know `If-None-Match` may ignore it: returns whether the second of two
     * writes of one name fails. The file is removed.
     */
    public static boolean letsOneWriterWin(String folder, Configuration conf) throws IOException {
        Path path = new Path(folder, "_lookback_probe_" + UUID.randomUUID());
        S3LogStore store = new S3LogStore(conf);
        try {
            store.write(path, Collections.singleton("first").iterator(), Boolean.FALSE, conf);
            store.write(path, Collections.singleton("second").iterator(), Boolean.FALSE, conf);
            return false;
        } catch (FileAlreadyExistsException error) {
            return true;
        } finally {
            path.getFileSystem(conf).delete(path, false);
        }
    }
}
