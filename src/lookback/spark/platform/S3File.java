package lookback;

import java.io.IOException;
import java.io.InputStream;
import java.io.OutputStream;
import java.nio.file.FileAlreadyExistsException;
import java.security.DigestInputStream;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;

import org.apache.hadoop.fs.FSDataOutputStream;
import org.apache.hadoop.fs.FSDataOutputStreamBuilder;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.s3a.RemoteFileChangedException;

/**
 * A new file on S3, which is there as a whole once it is closed: one PUT, or an upload in parts if it is large.
 *
 * It needs S3A of Hadoop 3.4.2 or later. An older one, or one whose conditional writes are switched off, refuses the
 * option that is mandatory here.
 */
class S3File extends OutputStream {

    private static final int BUFFER_BYTES = 65536;

    private final FileSystem files;
    private final Path path;
    private final boolean overwrites;
    private final FSDataOutputStream stream;
    private final MessageDigest written = makeDigest();
    private boolean ended = false;

    /** Without `overwrites`, `close` fails if a file of that name exists. */
    S3File(FileSystem files, Path path, boolean overwrites) throws IOException {
        this.files = files;
        this.path = path;
        this.overwrites = overwrites;
        FSDataOutputStreamBuilder builder = files.createFile(path).overwrite(true);
        // The name is never that of a folder, so do not ask.
        builder.opt("fs.s3a.create.performance", true);
        if (!overwrites) {
            builder.must("fs.option.create.conditional.overwrite", true);
        }
        this.stream = (FSDataOutputStream) builder.build();
    }

    public void write(int value) throws IOException {
        written.update((byte) value);
        stream.write(value);
    }

    public void write(byte[] bytes, int start, int length) throws IOException {
        written.update(bytes, start, length);
        stream.write(bytes, start, length);
    }

    /** Makes the file. Throws FileAlreadyExistsException if it exists and may not be overwritten. */
    public synchronized void close() throws IOException {
        if (ended) {
            return;
        }
        ended = true;
        try {
            stream.close();
        } catch (RemoteFileChangedException error) {
            if (overwrites) {
                throw error;
            }
            // S3A repeats a PUT whose answer was lost. If the file is what was written here, the first one had succeeded.
            if (!MessageDigest.isEqual(written.digest(), readDigest())) {
                throw new FileAlreadyExistsException(path.toString());
            }
        }
    }

    /** Lets no file be made. */
    synchronized void abort() {
        if (!ended) {
            ended = true;
            stream.abort();
        }
    }

    private byte[] readDigest() throws IOException {
        DigestInputStream content = new DigestInputStream((InputStream) files.open(path), makeDigest());
        try {
            byte[] buffer = new byte[BUFFER_BYTES];
            while (content.read(buffer) >= 0) {
            }
        } finally {
            content.close();
        }
        return content.getMessageDigest().digest();
    }

    private static MessageDigest makeDigest() {
        try {
            return MessageDigest.getInstance("SHA-256");
        } catch (NoSuchAlgorithmException error) {
            throw new IllegalStateException(error);
        }
    }
}
