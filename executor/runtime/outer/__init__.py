"""Outer steps of pipelines that train separately: what they send, and what each keeps of the common parameters."""
