package lookback;

import io.delta.storage.HDFSLogStore;
import java.io.BufferedWriter;
import java.io.File;
import java.io.FileNotFoundException;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.OutputStream;
import java.io.OutputStreamWriter;
import java.nio.charset.StandardCharsets;
import java.nio.file.CopyOption;
import java.nio.file.FileAlreadyExistsException;
import java.nio.file.FileSystemException;
import java.nio.file.Files;
import java.nio.file.StandardCopyOption;
import java.util.ArrayList;
import java.util.Collections;
import java.util.Iterator;
import java.util.List;
import java.util.UUID;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FileStatus;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.Path;

/**
 * Delta's log in a local folder. `logstore.py` explains its purpose and compiles it with Janino, which supports neither generic
 * methods nor lambdas.
 */
public final class FolderLogStore extends HDFSLogStore {

    public FolderLogStore(Configuration settings) {
        super(settings);
    }

    /** Lists the files of the folder by name, starting with `first`. Stats only these files. */
    public Iterator listFrom(Path first, Configuration settings) throws IOException {
        Path folder = first.getParent();
        String[] all = toFile(folder).list();
        if (all == null) {
            throw new FileNotFoundException("No such file or directory: " + folder);
        }
        List names = new ArrayList();
        for (int at = 0; at < all.length; at++) {
            if (all[at].compareTo(first.getName()) >= 0) {
                names.add(all[at]);
            }
        }
        Collections.sort(names);
        FileSystem files = first.getFileSystem(settings);
        List found = new ArrayList();
        for (Iterator each = names.iterator(); each.hasNext(); ) {
            try {
                found.add(files.getFileStatus(new Path(folder, (String) each.next())));
            } catch (FileNotFoundException gone) {
                // Removed in the meantime: the log was cleaned, or another process was writing the file.
            }
        }
        return found.iterator();
    }

    /** Writes a file atomically. Throws FileAlreadyExistsException if it exists, unless `overwrite`. */
    public void write(Path path, Iterator lines, Boolean overwrite, Configuration settings) throws IOException {
        java.nio.file.Path file = toFile(path).toPath();
        java.nio.file.Path whole = file.resolveSibling("." + path.getName() + "." + UUID.randomUUID() + ".tmp");
        try {
            // Not a channel: stopping a stream would close it in the middle of a commit.
            OutputStream stream = new FileOutputStream(whole.toFile());
            BufferedWriter writer = new BufferedWriter(new OutputStreamWriter(stream, StandardCharsets.UTF_8));
            try {
                while (lines.hasNext()) {
                    writer.write((String) lines.next());
                    writer.write('\n');
                }
            } finally {
                writer.close();
            }
            if (overwrite.booleanValue()) {
                Files.move(whole, file, new CopyOption[] {StandardCopyOption.ATOMIC_MOVE});
            } else {
                create(file, whole);
            }
        } finally {
            Files.deleteIfExists(whole);
        }
    }

    /** Names the file `whole` also `file`. If several processes do so at the same time, only one succeeds. */
    private static void create(java.nio.file.Path file, java.nio.file.Path whole) throws IOException {
        try {
            Files.createLink(file, whole);
        } catch (FileAlreadyExistsException exists) {
            throw exists;
        } catch (FileSystemException noLinks) {
            // Not every file system has hard links. Like Delta's own log store, a move checks first whether the file exists.
            Files.move(whole, file, new CopyOption[0]);
        }
    }

    private static File toFile(Path path) {
        return new File(path.toUri().getPath());
    }
}
