# cython: language_level=3, boundscheck=False, wraparound=False, freethreading_compatible=True
"""The kernel's door: raw addresses in, the GIL released, nothing checked. zfunc/optim/host_update.py checks.

Addresses are those of 1-D contiguous arrays of n elements. Types are FP32, BF16, FP16 (or NONE for no
copy); an instruction set is an index into INSTRUCTION_SETS, or -1 for the best one this CPU runs.
"""

from libc.stddef cimport size_t
from libc.stdint cimport int16_t, uint16_t, uint32_t, uint64_t, uintptr_t


cdef extern from *:
    """
    #include <errno.h>
    #include <linux/futex.h>
    #include <sys/syscall.h>
    #include <unistd.h>

    /* Adds 0 to the word, atomically, in the operating system: where memory cannot be written, that is an
     * error and not a signal. Bytes around the address do not change, whoever else writes there. */
    static int zf_writable(uintptr_t address) {
        int unused = 0;
        long woken = syscall(SYS_futex, &unused, FUTEX_WAKE_OP | FUTEX_PRIVATE_FLAG, 0, 0L,
                       (int *)(address & ~(uintptr_t)3), FUTEX_OP(FUTEX_OP_ADD, 0, FUTEX_OP_CMP_EQ, 0));
        return woken >= 0 || errno != EFAULT; /* where the call is not allowed, nothing is known */
    }
    """
    bint zf_writable(uintptr_t address)

cdef extern from "_adam_kernel.h" nogil:
    ctypedef struct zf_state:
        void *master
        int16_t *low
        void *exp_avg
        void *exp_avg_sq
        int16_t *exp_avg_sq_scale
    ctypedef struct zf_adam_args:
        zf_state state
        zf_state into
        const void *grad
        void *out
        int moments, grad_type, out_type, decay_mode
        uint32_t exp_avg_dither, exp_avg_sq_dither
        float grad_scale, grad_floor, beta1, one_minus_beta1, beta2, one_minus_beta2
        float step_size, inv_sqrt_bias2, eps, decay
    ctypedef struct zf_sum_args:
        float *acc
        const void *grad
        int grad_type, first
    ctypedef struct zf_skeleton_args:
        void *state[4]
        size_t width[4]
        const uint16_t *in_ "in"
        uint16_t *out
    int ZF_NONE, ZF_FP32, ZF_BF16, ZF_FP16, ZF_NO_DECAY, ZF_DECOUPLED, ZF_L2, ZF_NUM_ISA
    int ZF_MOMENTS_FP32, ZF_MOMENTS_16BIT, ZF_MOMENTS_8BIT, ZF_MOMENTS_FP32_SPLIT, ZF_BLOCK, ZF_SHARED, ZF_PARTS
    bint zf_supports(int isa)
    void zf_adam(zf_adam_args *args, size_t n, int threads, int isa)
    void zf_sum(zf_sum_args *args, size_t n, int threads, int isa, double *parts)
    void zf_skeleton(zf_skeleton_args *args, size_t n, int threads, int isa)

cdef extern from "_block_sums.h" nogil:
    void zf_block_sums(const char *data, size_t blocks, uint64_t *sums, int isa)


cdef extern from "_one_buffer_kernel.h" nogil:
    ctypedef struct zf_one_state:
        void *master
        int16_t *low
        void *buffer
        int16_t *scale
    ctypedef struct zf_one_args:
        zf_one_state state
        zf_one_state into
        const void *grad
        void *out
        int rule, buffer_type, grad_type, out_type, decay_mode
        uint32_t dither
        float grad_scale, grad_floor, rate, decay, keep, add, look_keep, look_add, eps, initial
    int ZF_SGD, ZF_NESTEROV, ZF_LION, ZF_ADAGRAD, ZF_DIRECTION
    int ZF_BUFFER_NONE, ZF_BUFFER_FP32, ZF_BUFFER_BF16, ZF_BUFFER_SIGNED, ZF_BUFFER_UNSIGNED
    void zf_one(zf_one_args *args, size_t n, int threads, int isa)

cdef extern from "_adafactor_kernel.h" nogil:
    ctypedef struct zf_weights:
        void *master
        int16_t *low
    ctypedef struct zf_factor_args:
        const void *grad
        int grad_type
        size_t rows, columns, first
        float grad_scale, grad_floor
        float *row_largest
        float *column_largest
        const double *row_unit
        const double *column_unit
        double *row_sum
        double *column_sum
        const float *left
        const float *right
        float limit
        double *direction_squares
        double *weight_squares
        zf_weights weights
        zf_weights into
        void *out
        int out_type, decays
        float rate, decay
    void zf_largest(zf_factor_args *args, size_t n, int threads, int isa)
    void zf_factor_sums(zf_factor_args *args, size_t n, int threads, int isa)
    void zf_factor_squares(zf_factor_args *args, size_t n, int threads, int isa)
    void zf_factored(zf_factor_args *args, size_t n, int threads, int isa)


NONE, FP32, BF16, FP16 = ZF_NONE, ZF_FP32, ZF_BF16, ZF_FP16
NO_DECAY, DECOUPLED, L2 = ZF_NO_DECAY, ZF_DECOUPLED, ZF_L2
UNIT, SHARED = ZF_BLOCK, ZF_SHARED  # elements: what threads are dealt, and what shares a scale
PARTS = ZF_PARTS  # doubles that a sum of squares consists of
MOMENTS_FP32, MOMENTS_16BIT, MOMENTS_8BIT = ZF_MOMENTS_FP32, ZF_MOMENTS_16BIT, ZF_MOMENTS_8BIT
MOMENTS_FP32_SPLIT = ZF_MOMENTS_FP32_SPLIT
SGD, NESTEROV, LION, ADAGRAD, DIRECTION = ZF_SGD, ZF_NESTEROV, ZF_LION, ZF_ADAGRAD, ZF_DIRECTION
ADAM = ZF_DIRECTION + 1
BUFFER_NONE, BUFFER_FP32, BUFFER_BF16 = ZF_BUFFER_NONE, ZF_BUFFER_FP32, ZF_BUFFER_BF16
BUFFER_SIGNED, BUFFER_UNSIGNED = ZF_BUFFER_SIGNED, ZF_BUFFER_UNSIGNED
INSTRUCTION_SETS = ("baseline", "avx2", "avx512")
cdef int best_isa = max(isa for isa in range(ZF_NUM_ISA) if zf_supports(isa))


def instruction_sets():
    """Names of the instruction sets this CPU can run, the plainest first."""
    return tuple(name for isa, name in enumerate(INSTRUCTION_SETS) if zf_supports(isa))


def instruction_set():
    """Name of the instruction set used when none is asked for: the best this CPU runs."""
    return INSTRUCTION_SETS[best_isa]


cdef int checked_isa(int isa) except -1:
    if isa < 0:
        return best_isa
    if isa >= ZF_NUM_ISA or not zf_supports(isa):  # running it would be an illegal instruction
        raise ValueError(f"instruction set {isa} does not run on this CPU; it runs {instruction_sets()}")
    return isa


def writable(uintptr_t address):
    """Whether the memory at this address can be written."""
    return zf_writable(address)


cdef zf_state state_at(addresses):
    cdef zf_state state
    cdef uintptr_t master = addresses[0], low = addresses[1], m = addresses[2], v = addresses[3]
    cdef uintptr_t scale = addresses[4]
    state.master, state.low = <void *>master, <int16_t *>low
    state.exp_avg, state.exp_avg_sq, state.exp_avg_sq_scale = <void *>m, <void *>v, <int16_t *>scale
    return state


cdef zf_one_state one_state_at(addresses):
    cdef zf_one_state state
    cdef uintptr_t master = addresses[0], low = addresses[1], buffer = addresses[2], scale = addresses[4]
    state.master, state.low = <void *>master, <int16_t *>low
    state.buffer, state.scale = <void *>buffer, <int16_t *>scale
    return state


def update(
    int rule,                # IN    ADAM, SGD, NESTEROV, LION, ADAGRAD, DIRECTION
    int moments,             # IN    of ADAM: MOMENTS_FP32 and so on; of the others: BUFFER_NONE and so on
    state,                   # INOUT five addresses: [n] weights in fp32, or bf16: the high half, 0: DIRECTION has
                             #       none; [n] int16, the low half, or 0; two [n] of moments, or 0;
                             #       [ceil(n / 64)] int16, the scales of codes, or 0. IN with others in `into`
    into,                    # OUT   five addresses as in `state`, for the new state; the same: in place
    uintptr_t grad,          # IN    [n] of grad_type
    uintptr_t out,           # OUT   [n] of out_type, or 0
    size_t n,
    int grad_type,           # IN    FP32, BF16, FP16
    int out_type,            # IN    NONE, FP32, BF16, FP16
    int decay_mode,          # IN    NO_DECAY, DECOUPLED, L2
    dithers,                 # IN    two: what rounding of compact moments adds, at a block's first element
    k,                       # IN    zfunc.optim.rules.Factors: rounded here, once, to float
    int threads,
    int isa=-1,
):
    """One step of an element-wise optimizer; see reference.py for what it computes."""
    cdef zf_adam_args adam
    cdef zf_one_args one
    cdef int use = checked_isa(isa)
    if rule == ADAM:
        adam.moments, adam.state, adam.into = moments, state_at(state), state_at(into)
        adam.exp_avg_dither, adam.exp_avg_sq_dither = dithers
        adam.grad, adam.out = <const void *>grad, <void *>out
        adam.grad_type, adam.out_type, adam.decay_mode = grad_type, out_type, decay_mode
        adam.grad_scale, adam.grad_floor = <float><double>k.grad_scale, <float><double>k.grad_floor
        adam.beta1, adam.one_minus_beta1 = <float><double>k.keep, <float><double>k.add
        adam.beta2, adam.one_minus_beta2 = <float><double>k.keep_sq, <float><double>k.add_sq
        adam.step_size, adam.inv_sqrt_bias2 = <float><double>k.rate, <float><double>k.root_scale
        adam.eps, adam.decay = <float><double>k.eps, <float><double>k.decay
        with nogil:
            zf_adam(&adam, n, threads, use)
        return
    one.rule, one.buffer_type, one.dither = rule, moments, dithers[0]
    one.state, one.into = one_state_at(state), one_state_at(into)
    one.grad, one.out = <const void *>grad, <void *>out
    one.grad_type, one.out_type, one.decay_mode = grad_type, out_type, decay_mode
    one.grad_scale, one.grad_floor = <float><double>k.grad_scale, <float><double>k.grad_floor
    one.rate, one.decay = <float><double>k.rate, <float><double>k.decay
    one.keep, one.add = <float><double>k.keep, <float><double>k.add
    one.look_keep, one.look_add = <float><double>k.look_keep, <float><double>k.look_add
    one.eps, one.initial = <float><double>k.eps, <float><double>k.initial
    with nogil:
        zf_one(&one, n, threads, use)


cdef zf_factor_args factor_args(matrix):
    cdef zf_factor_args args
    cdef uintptr_t grad = matrix[0]
    args.grad, args.grad_type = <const void *>grad, matrix[1]
    args.rows, args.columns = matrix[2], matrix[3]
    args.grad_scale, args.grad_floor = <float><double>matrix[4], <float><double>matrix[5]
    args.first = matrix[6]
    return args


cdef zf_weights weights_at(addresses):
    cdef zf_weights weights
    cdef uintptr_t master = addresses[0], low = addresses[1]
    weights.master, weights.low = <void *>master, <int16_t *>low
    return weights


def factor_largest(
    matrix,                  # IN    (gradient [n], its type, rows, columns, grad_scale, grad_floor, 0), as below
    size_t n,                # a multiple of rows * columns: as many matrices
    uintptr_t rows,          # INOUT [n / columns] fp32
    uintptr_t columns,       # INOUT [n / rows] fp32
    int threads,
    int isa=-1,
):
    """The largest gradient of every row and of every column, by size, and of what is there."""
    cdef zf_factor_args args = factor_args(matrix)
    cdef int use = checked_isa(isa)
    args.row_largest, args.column_largest = <float *>rows, <float *>columns
    with nogil:
        zf_largest(&args, n, threads, use)


def factor_sums(
    matrix,
    size_t n,
    uintptr_t row_unit,      # IN    [n / columns] double
    uintptr_t column_unit,   # IN    [n / rows] double
    uintptr_t rows,          # INOUT [n / columns] double
    uintptr_t columns,       # INOUT [n / rows] double
    int threads,
    int isa=-1,
):
    """Add the exact sums of the squares of every row and of every column, rounded as their units say."""
    cdef zf_factor_args args = factor_args(matrix)
    cdef int use = checked_isa(isa)
    args.row_unit, args.column_unit = <const double *>row_unit, <const double *>column_unit
    args.row_sum, args.column_sum = <double *>rows, <double *>columns
    with nogil:
        zf_factor_sums(&args, n, threads, use)


def factor_squares(
    matrix,                  # IN    as above, with the parameter's element that the first one here is, for 0
    size_t n,
    uintptr_t left,          # IN    fp32 of every row of the parameter
    uintptr_t right,         # IN    fp32 of every column
    double limit,            # IN    of their products
    weights,                 # IN    addresses: [n] fp32, 0; or the halves of a split master
    uintptr_t direction,     # OUT   [ceil(n / 64)] double
    uintptr_t of_weights,    # OUT   [ceil(n / 64)] double
    int threads,
    int isa=-1,
):
    """Sums of squares of every 64 elements: of the direction of an update, and of the weights."""
    cdef zf_factor_args args = factor_args(matrix)
    cdef int use = checked_isa(isa)
    args.left, args.right, args.limit = <const float *>left, <const float *>right, <float>limit
    args.weights = weights_at(weights)
    args.direction_squares, args.weight_squares = <double *>direction, <double *>of_weights
    with nogil:
        zf_factor_squares(&args, n, threads, use)


def factored_update(
    matrix,                  # IN    as above
    size_t n,
    uintptr_t left,          # IN    fp32 of every row of the parameter
    uintptr_t right,         # IN    fp32 of every column
    double limit,            # IN    of their products
    weights,                 # IN    addresses: [n] fp32, 0; or the halves of a split master
    into,                    # OUT   as `weights`, which they may be
    uintptr_t out,           # OUT   [n] of out_type, or 0
    int out_type,            # IN    NONE, FP32, BF16, FP16
    bint decays,             # IN    whether weights decay
    double rate,
    double decay,
    int threads,
    int isa=-1,
):
    """Move weights along the direction; see adafactor_update.py for what the sweeps compute together."""
    cdef zf_factor_args args = factor_args(matrix)
    cdef int use = checked_isa(isa)
    args.left, args.right, args.limit = <const float *>left, <const float *>right, <float>limit
    args.weights, args.into = weights_at(weights), weights_at(into)
    args.out, args.out_type, args.decays = <void *>out, out_type, decays
    args.rate, args.decay = <float>rate, <float>decay
    with nogil:
        zf_factored(&args, n, threads, use)


def accumulate(
    uintptr_t acc,           # INOUT [n] fp32; OUT if first; 0: sum the squares of grad, write nothing
    uintptr_t grad,          # IN    [n] of grad_type
    uintptr_t parts,         # OUT   [PARTS] double
    size_t n,
    int grad_type,
    bint first,              # IN    acc = grad instead of acc = acc + grad
    int threads,
    int isa=-1,
):
    """Add grad to acc, and sum the squares of the new acc in parts that are added without rounding."""
    cdef zf_sum_args args
    cdef int use = checked_isa(isa)
    args.acc = <float *>acc
    args.grad = <const void *>grad
    args.grad_type, args.first = grad_type, first
    with nogil:
        zf_sum(&args, n, threads, use, <double *>parts)


def skeleton(
    state,                   # INOUT pairs (address, bytes an element), at most 4; the first of 2 bytes without out
    uintptr_t grad,          # IN    [n] 16 bits
    uintptr_t out,           # OUT   [n] 16 bits, or 0
    size_t n,
    int threads,
    int isa=-1,
):
    """Move the bytes of a step over such state without arithmetic: the benchmark's yardstick."""
    cdef zf_skeleton_args args
    cdef int use = checked_isa(isa), k
    cdef uintptr_t address
    for k in range(4):
        address, args.width[k] = state[k] if k < len(state) else (0, 0)
        args.state[k] = <void *>address
    args.in_, args.out = <const uint16_t *>grad, <uint16_t *>out
    with nogil:
        zf_skeleton(&args, n, threads, use)


def block_sums(
    uintptr_t data,          # IN    [blocks] of 4,096 bytes
    uintptr_t sums,          # OUT   [blocks][2] uint64
    size_t blocks,
    int isa=-1,
):
    """Fletcher's checksum of each block of a disk: the sum of its 64-bit words, and the sum of their sums so far."""
    cdef int use = checked_isa(isa)
    with nogil:
        zf_block_sums(<const char *>data, blocks, <uint64_t *>sums, use)
