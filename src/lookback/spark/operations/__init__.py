"""The work of a person or a nightly job on a place: status, maintenance, grants, deletion on request, notifications."""
