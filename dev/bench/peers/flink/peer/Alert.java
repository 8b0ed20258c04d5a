package peer;

/** A rule held at an event: the sum in cents or the count that it held with. */
public class Alert {
    public String ruleId;
    public long eventId;
    public long value;

    public Alert() {}

    public Alert(String ruleId, long eventId, long value) {
        this.ruleId = ruleId;
        this.eventId = eventId;
        this.value = value;
    }

    /** The line of the alerts file, without its end. */
    public String line() {
        return ruleId + ',' + eventId + ',' + value;
    }
}
