package peer.demo;

/** An event on its way to one rule, under that rule's key. */
public class Keyed {
    public DemoEvent event;
    public String key;
    public String ruleId;

    public Keyed() {}

    public Keyed(DemoEvent event, String key, String ruleId) {
        this.event = event;
        this.key = key;
        this.ruleId = ruleId;
    }

    public String getKey() {
        return key;
    }
}
