package peer;

import java.io.File;
import java.io.IOException;
import java.io.Serializable;
import java.util.ArrayList;
import java.util.List;
import org.apache.flink.shaded.jackson2.com.fasterxml.jackson.databind.JsonNode;
import org.apache.flink.shaded.jackson2.com.fasterxml.jackson.databind.ObjectMapper;

/**
 * One rule as its JSON says it: an aggregate over [t - windowUs, t], both ends included, per key, with a limit.
 *
 * <p>Public fields and an empty constructor make it a POJO for Flink, so that it can be broadcast.
 */
public class Rule implements Serializable {
    private static final long serialVersionUID = 1L;

    /** Behind the watermark, beyond the window: 10 s out-of-orderness and 1 h allowed lateness, in microseconds. */
    public static final long LATENESS_US = 3_610_000_000L;

    public String ruleId;
    public String groupBy;
    public String aggregate;
    public long windowUs;
    public long atLeast;
    public long minAmountCents;

    public Rule() {}

    /** Reads all rules of a file. */
    public static List<Rule> read(File file) throws IOException {
        List<Rule> rules = new ArrayList<>();
        for (JsonNode node : new ObjectMapper().readTree(file).get("rules")) {
            Rule rule = new Rule();
            rule.ruleId = node.get("rule_id").asText();
            rule.groupBy = node.get("group_by").asText();
            rule.aggregate = node.get("aggregate").asText();
            rule.windowUs = node.get("window_us").asLong();
            rule.atLeast = node.get("at_least").asLong();
            rule.minAmountCents = node.has("min_amount_cents") ? node.get("min_amount_cents").asLong() : Long.MIN_VALUE;
            if (!rule.groupBy.equals("customer_id") && !rule.groupBy.equals("terminal_id")) {
                throw new IOException("rule " + rule.ruleId + " groups by " + rule.groupBy);
            }
            if (!rule.aggregate.equals("sum") && !rule.aggregate.equals("count")) {
                throw new IOException("rule " + rule.ruleId + " aggregates " + rule.aggregate);
            }
            rules.add(rule);
        }
        return rules;
    }

    public boolean byCustomer() {
        return groupBy.equals("customer_id");
    }

    public boolean sums() {
        return aggregate.equals("sum");
    }
}
