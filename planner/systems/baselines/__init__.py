"""Baseline strategies: `ddp`, `megatron`, `gpipe`, `zb-h1-equal`, `pipedream`, `dapple` and `hetpipe`."""
