package lookback;

import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.file.FileAlreadyExistsException;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.Path;
import org.apache.spark.sql.execution.streaming.checkpointing.CheckpointFileManager;
import org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager;

/**
 * Writes each file of a query's checkpoint on S3 with one PUT, and so the sums that Delta writes beside its commits.
 *
 * Spark writes a draft and renames it. S3 cannot rename, so S3A looks at both names, copies and deletes. Spark's module
 * hadoop-cloud has a manager without renames, but it only logs the error of a failed upload: the query would go on as if
 * the file were there.
 */
public class S3CheckpointFiles extends FileSystemBasedCheckpointFileManager {

    // The names of the files in `offsets` and `commits`.
    private static final Pattern BATCH = Pattern.compile(".*/(offsets|commits)/([0-9]+)");

    // The batch that was written last. Before Spark writes the next one it looks whether that is there, as its PUT does.
    private volatile long lastBatch = -2;

    public S3CheckpointFiles(Path path, Configuration conf) {
        super(path, conf);
    }

    public CheckpointFileManager.CancellableFSDataOutputStream createAtomic(Path path, boolean overwrites) {
        if (!"s3a".equals(fs().getScheme())) {
            return super.createAtomic(path, overwrites);
        }
        try {
            return new Draft(this, path, new S3File(fs(), path, overwrites));
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
    }

    public boolean exists(Path path) {
        Matcher batch = BATCH.matcher(path.toString());
        if (!batch.matches()) {
            return super.exists(path);
        }
        if (Long.parseLong(batch.group(2)) == lastBatch + 1) {
            return false;
        }
        try {
            // Not a folder, for which S3A would list.
            return fs().isFile(path);
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
    }

    private static class Draft extends CheckpointFileManager.CancellableFSDataOutputStream {

        private final S3CheckpointFiles files;
        private final Matcher batch;
        private final S3File file;

        Draft(S3CheckpointFiles files, Path path, S3File file) {
            super(file);
            this.files = files;
            this.batch = BATCH.matcher(path.toString());
            this.file = file;
        }

        public void close() throws IOException {
            try {
                file.close();
            } catch (FileAlreadyExistsException error) {
                // Spark catches Hadoop's exception of that name.
                throw new org.apache.hadoop.fs.FileAlreadyExistsException(error.getMessage());
            }
            if (batch.matches()) {
                files.lastBatch = Long.parseLong(batch.group(2));
            }
        }

        public void cancel() {
            file.abort();
        }
    }
}
