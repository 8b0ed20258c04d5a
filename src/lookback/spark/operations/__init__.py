"""What a person or a nightly job does with a place: status, maintenance, grants, deletion on request, notifications."""
