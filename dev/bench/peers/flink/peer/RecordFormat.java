package peer;

import java.io.IOException;
import java.io.Serializable;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import org.apache.flink.api.common.typeinfo.TypeInformation;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.connector.file.src.FileSourceSplit;
import org.apache.flink.connector.file.src.reader.BulkFormat;
import org.apache.flink.connector.file.src.util.CheckpointedPosition;
import org.apache.flink.connector.file.src.util.MutableRecordAndPosition;
import org.apache.flink.connector.file.src.util.RecordAndPosition;
import org.apache.flink.core.fs.FSDataInputStream;

/**
 * Little-endian records of 28 bytes (event_id, event_time in microseconds, customer_id, terminal_id, amount_cents) in
 * blocks. One split per file, so that events come in the order of the file.
 */
public final class RecordFormat<T> implements BulkFormat<T, FileSourceSplit> {
    private static final long serialVersionUID = 1L;
    public static final int RECORD_BYTES = 28;
    private static final int BLOCK_RECORDS = 4096;

    /** Makes an event of the record at a place of a block. May hand out the same object again and again. */
    public interface Decoder<T> extends Serializable {
        T decode(ByteBuffer block, int at);
    }

    private final Decoder<T> decoder;
    private final TypeInformation<T> type;

    public RecordFormat(Decoder<T> decoder, TypeInformation<T> type) {
        this.decoder = decoder;
        this.type = type;
    }

    @Override
    public Reader<T> createReader(Configuration configuration, FileSourceSplit split) throws IOException {
        try {
            Progress.awaitRules();
        } catch (InterruptedException error) {
            Thread.currentThread().interrupt();
            throw new IOException("stopped before the rules arrived", error);
        }
        return restoreReader(configuration, split);
    }

    @Override
    public Reader<T> restoreReader(Configuration configuration, FileSourceSplit split) throws IOException {
        CheckpointedPosition position = split.getReaderPosition().orElse(new CheckpointedPosition(0, 0));
        long start = Math.max(0, position.getOffset()) + position.getRecordsAfterOffset() * RECORD_BYTES;
        FSDataInputStream stream = split.path().getFileSystem().open(split.path());
        stream.seek(start);
        return new BlockReader<>(stream, start, decoder);
    }

    @Override
    public boolean isSplittable() {
        return false;
    }

    @Override
    public TypeInformation<T> getProducedType() {
        return type;
    }

    private static final class BlockReader<T> implements Reader<T> {
        private final FSDataInputStream stream;
        private final Decoder<T> decoder;
        private long offset;

        BlockReader(FSDataInputStream stream, long offset, Decoder<T> decoder) {
            this.stream = stream;
            this.offset = offset;
            this.decoder = decoder;
        }

        @Override
        public RecordIterator<T> readBatch() throws IOException {
            byte[] block = new byte[BLOCK_RECORDS * RECORD_BYTES];
            int read = stream.readNBytes(block, 0, block.length);
            if (read == 0) {
                return null;
            }
            if (read % RECORD_BYTES != 0) {
                throw new IOException("the file does not end with a whole record");
            }
            Block<T> records = new Block<>(ByteBuffer.wrap(block, 0, read), offset, decoder);
            offset += read;
            return records;
        }

        @Override
        public void close() throws IOException {
            stream.close();
        }
    }

    private static final class Block<T> implements RecordIterator<T> {
        private final ByteBuffer block;
        private final Decoder<T> decoder;
        private final MutableRecordAndPosition<T> current = new MutableRecordAndPosition<>();
        private int at;

        Block(ByteBuffer block, long offset, Decoder<T> decoder) {
            this.block = block.order(ByteOrder.LITTLE_ENDIAN);
            this.decoder = decoder;
            current.set(null, offset, 0);
        }

        @Override
        public RecordAndPosition<T> next() {
            if (at == block.limit()) {
                return null;
            }
            current.setNext(decoder.decode(block, at));
            at += RECORD_BYTES;
            return current;
        }

        @Override
        public void releaseBatch() {}
    }
}
