"""Parameters, saved activations and FLOP of a transformer's layers, counted from its shape.

Symbols: T tokens of a sample, w width, i width inside the MLP, V vocabulary; h query heads and g key-value heads of
width d.

    block parameters   attention w d (h + 2 g) + h d w, MLP (2, gated 3) w i for each expert, norms, biases
    block forward      2 FLOP for each token and each weight it is multiplied by, 4 T min(T, window) h d for attention
    block saves        for each token: inputs of both norms and of the matrices after them 4 w, queries, keys, values
                       and attention's output (2 h + 2 g) d, the logarithms of softmax's sums h, inside the MLP 2 i,
                       gated 4 i, for each active expert, and the statistics of norms
    embedding saves    token numbers, 8 bytes each; the lookup of embeddings is counted as 0 FLOP
    head saves         for each token 2 w, the logarithms of V probabilities, and the number of the target token

Numbers have 4 bytes; in half precision, the head still computes its loss in float32 and saves probabilities in it.
Saved activations are those of torch's fused norms and activations and of
scaled_dot_product_attention without dropout; models of many small operations save more, models with ReLU less. A head
that shares the embedding's table counts as holding a copy, because the ends of a pipeline are on different devices;
their gradients are summed (planner/cost/synchronisation.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from planner.scenario.kind_table import MatrixProduct
from planner.scenario.profile import NO_SUMS, GroupSums
from planner.scenario.roofline import LayerWork
from planner.scenario.sharding import Sharding
from traces.common.errors import InputError

# With embedding and head, as many layers as a model may have.
_MOST_BLOCKS = 998

_NUMBER_BYTES = 4
_TOKEN_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """A stack of equal blocks between an embedding and a head.

    Attributes:
        vocabulary: Number of different tokens.
        width: Numbers per token between blocks (hidden size).
        blocks: Number of blocks.
        heads: Number of query heads.
        key_value_heads: Number of key and value heads.
        head_width: Numbers per token in each head.
        inner: Width inside the MLP, or inside each expert.
        gated: Whether the MLP multiplies two projections, as SwiGLU does.
        experts: Number of MLPs in a block.
        active_experts: Number of experts that compute each token.
        norm_parameters: Parameters of a norm per unit of width: 2 with a bias, 1 without.
        query_bias: Whether queries, keys and values have biases.
        output_bias: Whether attention's output has a bias.
        inner_bias: Whether the MLP's matrices have biases.
        head_norms: Whether queries and keys are normalised in each head.
        rotary: Whether queries and keys are rotated by angles of their positions.
        activation_kernels: Number of kernels of the MLP's activation function as transformers computes it.
        positions: Rows of learned tables other than the token table: positions and token types.
        embedding_width: Width of the token table; if it differs from ``width``, two more matrices convert.
        embedding_norm: Whether the embedding ends with a norm.
        final_norm: Whether the head begins with a norm.
        head_transform: Whether the head begins with a square matrix, its bias and a norm.
        head_bias: Whether logits have a bias.
        tied: Whether the head uses the token table of the embedding.
        window: Number of previous tokens that attention covers; None for all.
        longest: Number of tokens in the longest sample; None for no limit.

    Raises:
        InputError: A size is not above zero, or heads do not divide into groups.
    """

    vocabulary: int
    width: int
    blocks: int
    heads: int
    key_value_heads: int
    head_width: int
    inner: int
    gated: bool = False
    experts: int = 1
    active_experts: int = 1
    norm_parameters: int = 2
    query_bias: bool = True
    output_bias: bool = True
    inner_bias: bool = True
    head_norms: bool = False
    rotary: bool = False
    activation_kernels: int = 1
    positions: int = 0
    embedding_width: int
    embedding_norm: bool = False
    final_norm: bool = True
    head_transform: bool = False
    head_bias: bool = False
    tied: bool = True
    window: int | None = None
    longest: int | None = None

    def __post_init__(self) -> None:
        counts = {"vocabulary": self.vocabulary, "width": self.width, "blocks": self.blocks, "heads": self.heads}
        counts |= {"key-value heads": self.key_value_heads, "width of a head": self.head_width, "inner": self.inner}
        for name, count in counts.items():
            if count < 1:
                raise InputError(f"{name}: {count} is not allowed", valid="give a number above zero")
        if self.blocks > _MOST_BLOCKS:
            raise InputError(f"{self.blocks:,} blocks are too many", valid=f"{_MOST_BLOCKS:,} are possible")
        if self.heads % self.key_value_heads or not 1 <= self.active_experts <= self.experts:
            raise InputError(
                f"{self.heads} heads with {self.key_value_heads} key-value heads, or {self.active_experts} of "
                f"{self.experts} experts for a token, are not allowed",
                valid="give a multiple of the key-value heads, and each token 1 expert or more",
            )

    @property
    def parameters(self) -> int:
        """Number of parameters; a table shared by embedding and head counts once."""
        shared = self._table if self.tied else 0
        return self._embedding + self.blocks * self._block + self._head - shared

    def layers(self, tokens: int) -> Sequence[LayerWork]:
        """Return the work of embedding, blocks and head, in this order, for samples of ``tokens`` tokens.

        Raises:
            InputError: The model does not accept samples of this length.
        """
        if tokens < 1 or (self.longest is not None and tokens > self.longest):
            raise InputError(
                f"samples of {tokens} tokens are not allowed",
                valid=f"give 1 to {self.longest or 'any number'}, the longest that the model accepts",
            )
        bytes_ = tokens * _NUMBER_BYTES
        between = bytes_ * self.width
        block = LayerWork(
            "block",
            self._block_flop(tokens),
            _NUMBER_BYTES * self._block,
            between,
            bytes_ * self._saved,
            sharding=Sharding(
                gcd(self.heads, self.key_value_heads, self.inner),
                _NUMBER_BYTES * self._whole,
                bytes_ * (4 * self.width + 2 * self.norm_parameters),
                GroupSums(2, 2 * between),
                GroupSums(2, 2 * between),
            ),
            products=self._block_products(tokens),
            kernels=self._block_kernels,
        )
        saved = 2 * self.width + self.vocabulary + (self.norm_parameters if self.final_norm else 0)
        matrices = self._table + self._projection + (self.width**2 if self.head_transform else 0)
        saved_bytes = bytes_ * saved + tokens * _TOKEN_BYTES
        fixed_bytes = bytes_ * self.vocabulary + tokens * _TOKEN_BYTES
        outputs = bytes_ * self.vocabulary
        tied_bytes = _NUMBER_BYTES * self._table if self.tied else 0
        head = LayerWork(
            "head",
            2 * tokens * matrices,
            _NUMBER_BYTES * self._head,
            outputs,
            saved_bytes,
            fixed_bytes=fixed_bytes,
            sharding=Sharding(
                0,
                _NUMBER_BYTES * (self._head - self._table - (self.vocabulary if self.head_bias else 0)),
                bytes_ * 2 * self.width + tokens * _TOKEN_BYTES,
                NO_SUMS,
                GroupSums(1, between),
                tokens * _TOKEN_BYTES,
                self.vocabulary,
            ),
            tied_bytes=tied_bytes,
            products=self._head_products(tokens),
            kernels=self._head_kernels,
        )
        embedding = LayerWork(
            "embedding",
            2 * tokens * self._projection,
            _NUMBER_BYTES * self._embedding,
            between,
            tokens * _TOKEN_BYTES,
            fixed_bytes=tokens * _TOKEN_BYTES,
            sharding=Sharding(
                0,
                _NUMBER_BYTES * (self._embedding - self._table),
                tokens * _TOKEN_BYTES,
                GroupSums(1, between),
                NO_SUMS,
                tokens * _TOKEN_BYTES,
                self.vocabulary,
            ),
            tied_bytes=tied_bytes,
            products=(MatrixProduct(tokens, self.embedding_width, self.width),) if self._projection else (),
            # A lookup in each table and their sums.
            kernels=(3 if self.positions else 1) + bool(self._projection) + self.embedding_norm,
        )
        return [embedding, *[block] * self.blocks, head]

    @property
    def _table(self) -> int:
        return self.vocabulary * self.embedding_width

    @property
    def _projection(self) -> int:
        return self.width * self.embedding_width if self.embedding_width != self.width else 0

    @property
    def _embedding(self) -> int:
        norm = self.norm_parameters * self.width if self.embedding_norm else 0
        return self._table + self._projection + self.positions * self.width + norm

    @property
    def _head(self) -> int:
        norm = self.norm_parameters * self.width if self.final_norm else 0
        transform = self.width**2 + self.width + self.norm_parameters * self.width if self.head_transform else 0
        return norm + transform + self._projection + self._table + (self.vocabulary if self.head_bias else 0)

    @property
    def _attention(self) -> int:
        """Number of weights in the matrices of attention."""
        return 2 * self.width * self.head_width * (self.heads + self.key_value_heads)

    @property
    def _expert(self) -> int:
        return (3 if self.gated else 2) * self.width * self.inner

    @property
    def _router(self) -> int:
        return self.width * self.experts if self.experts > 1 else 0

    @property
    def _block(self) -> int:
        biases = self.head_width * (self.heads + 2 * self.key_value_heads) if self.query_bias else 0
        biases += self.experts * (2 if self.gated else 1) * self.inner if self.inner_bias else 0
        return self._attention + self.experts * self._expert + biases + self._whole

    @property
    def _whole(self) -> int:
        """Number of parameters of a block that every device of a tensor-parallel group holds."""
        biases = (self.width if self.output_bias else 0) + (self.experts * self.width if self.inner_bias else 0)
        norms = 2 * self.norm_parameters * self.width + (2 * self.head_width if self.head_norms else 0)
        return self._router + biases + norms

    def _block_flop(self, tokens: int) -> int:
        seen = min(tokens, self.window or tokens)
        matrices = self._attention + self.active_experts * self._expert + self._router
        return 2 * tokens * matrices + 4 * tokens * seen * self.heads * self.head_width

    def _block_products(self, tokens: int) -> tuple[MatrixProduct, ...]:
        """Return the products of a block; those of attention stand for one in each head, with the rows of all heads."""
        mixed, seen = self.heads * self.head_width, min(tokens, self.window or tokens)
        rows_of_expert = tokens * self.active_experts / self.experts
        return (
            MatrixProduct(tokens, self.width, mixed),
            MatrixProduct(tokens, self.width, self.key_value_heads * self.head_width, 2),
            MatrixProduct(tokens * self.heads, self.head_width, seen, divide="rows"),
            MatrixProduct(tokens * self.heads, seen, self.head_width, divide="rows"),
            MatrixProduct(tokens, mixed, self.width, divide="inner"),
            MatrixProduct(rows_of_expert, self.width, self.inner, self.experts * (2 if self.gated else 1)),
            MatrixProduct(rows_of_expert, self.inner, self.width, self.experts, divide="inner"),
        )

    @property
    def _block_kernels(self) -> int:
        """Number of kernels of a block's forward in transformers, with fused attention and biases in the products."""
        # Four products, and all between them; the angles' cosines and sines, and the rotations by them.
        attention = 5 + (17 if self.rotary else 0)
        norms = (4 if self.head_norms else 2) * self._norm_kernels
        # Products, activation function, and the product of both halves.
        expert = (4 if self.gated else 2) + self.activation_kernels
        # A router multiplies, and chooses; experts gather and scatter their tokens.
        routing = 2 + 2 * self.experts if self.experts > 1 else 0
        residuals = 2
        return attention + norms + residuals + expert * self.experts + routing

    @property
    def _norm_kernels(self) -> int:
        """Number of kernels of a norm: one, or without a bias the square, mean, epsilon, root and two products."""
        return 1 if self.norm_parameters == 2 else 6

    @property
    def _head_kernels(self) -> int:
        """Number of kernels of the head's forward and of the loss, which has two."""
        norms = (self.final_norm + self.head_transform) * self._norm_kernels
        # A transform has a product and an activation function.
        products = 1 + bool(self._projection) + 2 * self.head_transform
        return norms + products + 2

    def _head_products(self, tokens: int) -> tuple[MatrixProduct, ...]:
        products: tuple[MatrixProduct, ...] = (MatrixProduct(tokens, self.embedding_width, self.vocabulary),)
        if self._projection:
            products += (MatrixProduct(tokens, self.width, self.embedding_width),)
        if self.head_transform:
            products += (MatrixProduct(tokens, self.width, self.width),)
        return products

    @property
    def _saved(self) -> int:
        """Numbers that a block saves for a token. The statistics of a norm with a bias are a mean and a scale."""
        heads = self.heads + self.key_value_heads
        attention = 2 * heads * self.head_width + self.heads
        normed = heads * (self.head_width + 1) if self.head_norms else 0
        inside = self.active_experts * (4 if self.gated else 2) * self.inner
        return 4 * self.width + attention + normed + inside + 2 * self.norm_parameters
