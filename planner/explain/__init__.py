"""Why a plan is as fast as it is: the loads of stages and links, the bottleneck, and the gains of improvements."""
