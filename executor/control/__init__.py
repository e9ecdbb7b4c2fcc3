"""The processes of a job on one host: started, watched, steered and ended."""
