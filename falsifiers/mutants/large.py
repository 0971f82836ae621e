"""Wrong indices of large arrays, one for each operation that is asked of them."""

from blackswan.falsifiers.mutants.changes import short_index
from blackswan.falsifiers.mutants.registry import mutants

READ = "Rows that begin beyond the first 2^15 elements are read as zeros: an index of 16 bits, as one of 32 is at 2^31."

mutants("rms_norm", rms_norm_short_index=(READ, short_index("x")))
mutants("rope", rope_short_index=(READ, short_index("x")))
mutants("swiglu", swiglu_short_index=(READ, short_index("gate")))
mutants("softmax", softmax_short_index=(READ, short_index("x")))
mutants("linear", linear_short_index=(READ, short_index("x")))
mutants("attention", attention_short_index=(READ, short_index("q")))
mutants("cross_entropy_per_sample", cross_entropy_per_sample_short_index=(READ, short_index("logits")))
mutants("weighted_cross_entropy", weighted_cross_entropy_short_index=(READ, short_index("logits")))
mutants("lm_cross_entropy", lm_cross_entropy_short_index=(READ, short_index("logits")))
