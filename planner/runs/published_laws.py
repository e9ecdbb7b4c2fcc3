"""What publications say about losses of language models and the price of outer steps: priors of the fitted law."""

import math

import numpy as np

from planner.scenario.convergence import LossLaw

# Number of laws that are drawn from the deviations.
_DRAWS = 200

# By how much ln D rises where ln L falls by 1, at an exponent of 0.35 and a loss of which 30 % are above the floor: by
# this factor published prices, which are in the loss, become prices in samples.
_IN_SAMPLES = 1 / (0.35 * 0.3)

# Published prices of outer steps in the loss: mean and standard deviation of the coefficient of each of `TERMS`. The
# deviations are ours, so wide that a few runs outweigh them.
_PRICE_IN_LOSS: tuple[tuple[float, float], ...] = (
    # DiLoCo with one worker is as good as synchronous training or slightly better (arXiv 2503.09799).
    (0.0, 0.01),
    # The exponent of M in the joint fit L = 19.226 N^-0.0985 M^0.0116 for N parameters (arXiv 2503.09799).
    (0.0116, 0.01),
    # From H = 50 to 1000 the perplexity, about 16, rises by 2.9 % (arXiv 2311.08105): ln 1.029 / ln 16 / ln 20.
    (0.0034, 0.005),
    # Streaming and 4-bit pseudo-gradients lose nothing that was measured (arXiv 2501.18512).
    (0.0, 0.005),
    (0.0, 0.005),
    # 1 / H of diloco with momentum; publications have no price. In our short runs outer steps with momentum after every
    # few steps overshoot.
    (0.0, 0.1),
    # Averages instead of outer momentum: seldom ones are worse in the long runs of arXiv 2311.08105, frequent ones are
    # better in our short ones.
    (0.0, 0.02),
    (0.0, 0.005),
)
PRIOR_PRICE = tuple((_IN_SAMPLES * mean, _IN_SAMPLES * deviation) for mean, deviation in _PRICE_IN_LOSS)

# Loss of language models by parameters N and tokens D, E + A N^-a + B D^-b: the fit of arXiv 2404.10102 to the runs of
# Chinchilla (arXiv 2203.15556), in nats per token.
_FLOOR, _OF_SIZE, _SIZE_EXPONENT, _OF_TOKENS, _TOKENS_EXPONENT = 1.8172, 482.01, 0.3478, 2085.43, 0.3658
# Standard deviations of the logarithms of the law's shape, when another task is taken for theirs; ours.
_SHAPE_DEVIATION = (0.03, 0.1, 0.03, 0.5, 0.0)
_CRITICAL_TOKENS = 2_000_000


def published_law(parameters: int, tokens_of_a_sample: int) -> LossLaw:
    """Return the law that published fits give for a language model that nobody has measured.

    Args:
        parameters: Number of the model's parameters.
        tokens_of_a_sample: Number of tokens of a sample.
    """
    reference = 1e9
    shape = (
        math.log(_FLOOR + _OF_SIZE * parameters**-_SIZE_EXPONENT),
        math.log(_OF_TOKENS * reference**-_TOKENS_EXPONENT),
        math.log(_TOKENS_EXPONENT),
        math.log(tokens_of_a_sample / _CRITICAL_TOKENS),
        # Without knots the price does not grow.
        0.0,
    )
    mean = (*shape, *(each for each, _ in PRIOR_PRICE))
    deviations = (*_SHAPE_DEVIATION, *(deviation for _, deviation in PRIOR_PRICE))
    # The same ones each time.
    drawn = np.array(mean) + np.array(deviations) * np.random.default_rng(0).standard_normal((_DRAWS, len(mean)))
    return LossLaw(
        "published laws: arXiv 2404.10102 for the loss by parameters and tokens, 2503.09799 and 2311.08105 for workers "
        "and interval",
        reference / tokens_of_a_sample,
        mean,
        tuple(map(tuple, drawn.tolist())),
        ("diloco", "diloco-streaming"),
        ("none", "int4"),
        most_interval=500,
        most_workers=8,
    )
