package lookback;

import java.io.FileNotFoundException;
import java.io.IOException;
import java.io.InputStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.FileAlreadyExistsException;
import java.security.DigestInputStream;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;
import java.util.ArrayList;
import java.util.Collections;
import java.util.Iterator;
import java.util.UUID;

import io.delta.storage.S3SingleDriverLogStore;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FSDataOutputStream;
import org.apache.hadoop.fs.FSDataOutputStreamBuilder;
import org.apache.hadoop.fs.FileStatus;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.s3a.RemoteFileChangedException;
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
 *
 * It needs S3A of Hadoop 3.4.2 or later. An older one, or one whose conditional writes are switched off, refuses the
 * option that is mandatory here.
 */
public class S3LogStore extends S3SingleDriverLogStore {

    private static final int BUFFER_BYTES = 65536;
    // The names of buckets of S3 Express, which list in no order, end with this.
    private static final String UNORDERED_BUCKET = "--x-s3";

    public S3LogStore(Configuration conf) {
        super(conf);
    }

    public void write(Path path, Iterator<String> actions, Boolean overwrite, Configuration conf) throws IOException {
        FileSystem files = path.getFileSystem(conf);
        FSDataOutputStreamBuilder builder = files.createFile(path).overwrite(true);
        // The name is never that of a folder, so do not ask.
        builder.opt("fs.s3a.create.performance", true);
        if (!overwrite.booleanValue()) {
            builder.must("fs.option.create.conditional.overwrite", true);
        }
        MessageDigest written = makeDigest();
        FSDataOutputStream stream = (FSDataOutputStream) builder.build();
        try {
            while (actions.hasNext()) {
                byte[] line = (((String) actions.next()) + "\n").getBytes(StandardCharsets.UTF_8);
                written.update(line);
                stream.write(line);
            }
        } catch (RuntimeException error) {
            stream.abort();
            throw error;
        }
        try {
            stream.close();
        } catch (RemoteFileChangedException error) {
            if (overwrite.booleanValue()) {
                throw error;
            }
            // S3A repeats a PUT whose answer was lost. If the file is what was written here, the first one had succeeded:
            // a commit has an id of its own, so that no other one is equal to it.
            if (!MessageDigest.isEqual(written.digest(), readDigest(files, path))) {
                throw new FileAlreadyExistsException(path.toString());
            }
        }
    }

    /** Lists the files of a log from `path` on; without its older files, whose number grows. */
    public Iterator<FileStatus> listFrom(Path path, Configuration conf) throws IOException {
        S3AFileSystem files = (S3AFileSystem) path.getFileSystem(conf);
        if (files.getBucket().endsWith(UNORDERED_BUCKET)) {
            return super.listFrom(path, conf);
        }
        Path folder = files.makeQualified(path).getParent();
        String prefix = files.pathToKey(folder) + "/";
        String first = prefix + path.getName();
        // `startAfter` leaves out the name itself: begin before it.
        int last = first.length() - 1;
        String before = first.substring(0, last) + (char) (first.charAt(last) - 1);
        ListObjectsV2Request.Builder request = ListObjectsV2Request.builder()
            .bucket(files.getBucket()).prefix(prefix).delimiter("/").startAfter(before);
        S3Client client = files.getS3AInternals().getAmazonS3Client("list a log");
        ArrayList<FileStatus> found = new ArrayList<FileStatus>();
        try {
            ListObjectsV2Response page;
            String token = null;
            do {
                page = client.listObjectsV2((ListObjectsV2Request) request.continuationToken(token).build());
                for (Object each : page.contents()) {
                    S3Object object = (S3Object) each;
                    if (object.key().compareTo(first) >= 0) {
                        found.add(new FileStatus(
                            object.size().longValue(), false, 1, files.getDefaultBlockSize(folder),
                            object.lastModified().toEpochMilli(), new Path(folder, object.key().substring(prefix.length()))
                        ));
                    }
                }
                token = page.nextContinuationToken();
            } while (token != null);
        } catch (SdkException error) {
            throw S3AUtils.translateException("list", folder, error);
        }
        if (found.isEmpty() && !files.exists(folder)) {
            throw new FileNotFoundException("No such file or directory: " + folder);
        }
        return found.iterator();
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

    private static byte[] readDigest(FileSystem files, Path path) throws IOException {
        DigestInputStream stream = new DigestInputStream((InputStream) files.open(path), makeDigest());
        try {
            byte[] buffer = new byte[BUFFER_BYTES];
            while (stream.read(buffer) >= 0) {
            }
        } finally {
            stream.close();
        }
        return stream.getMessageDigest().digest();
    }

    private static MessageDigest makeDigest() {
        try {
            return MessageDigest.getInstance("SHA-256");
        } catch (NoSuchAlgorithmException error) {
            throw new IllegalStateException(error);
        }
    }
}
