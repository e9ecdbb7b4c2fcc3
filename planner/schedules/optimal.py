"""The best order there is, found and proved by a constraint solver (OR-tools CP-SAT): the measuring stick.

Every F, I and W is an interval on its worker's time, every transfer one on its channel's. Microbatches keep their
order in each stage and kind, which loses nothing where they are alike. B is left out: I and W in its place are never
later. Heeds ``in_flight`` and memory. Proving takes tenths of a second for 4 stages and 8 microbatches, half a minute
for 8 and 32.

Durations become whole ticks. Where they have a common measure (all are whole milliseconds, say) nothing is lost;
otherwise a tick is a 200,000th of the sum of all durations, and durations are rounded down so that the bound stays
proved. The makespan given is always that of the orders at the exact durations.
"""




LIMIT_S = 60.0
