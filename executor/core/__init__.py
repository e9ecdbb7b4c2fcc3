"""What all processes of a job share: documents, messages, clocks and failures."""
