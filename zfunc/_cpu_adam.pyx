# cython: language_level=3, boundscheck=False, wraparound=False, freethreading_compatible=True
"""The kernel's door: raw addresses in, the GIL released, nothing checked. zfunc/optim/updates.py checks.

Addresses are those of 1-D contiguous arrays of n elements. Types are FP32, BF16, FP16 (or NONE for no
copy); an instruction set is an index into INSTRUCTION_SETS, or -1 for the best one this CPU runs.
"""

from libc.stddef cimport size_t
from libc.stdint cimport uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc


cdef extern from *:
    """
    #ifdef __linux__
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
    #else /* nothing is known */
    static int zf_writable(uintptr_t address) { return address != 0; }
    #endif
    """
    bint zf_writable(uintptr_t address)

cdef extern from "_update_kernel.h" nogil:
    ctypedef struct zf_state:
        pass
    ctypedef struct zf_factors:
        pass
    int ZF_NONE, ZF_FP32, ZF_BF16, ZF_FP16, ZF_NO_DECAY, ZF_DECOUPLED, ZF_L2, ZF_NUM_ISA, ZF_BLOCK, ZF_SHARED
    int ZF_NO_WEIGHTS, ZF_MASTER, ZF_HALVES, ZF_HALVES_TO_EVEN, ZF_MOMENTS
    int ZF_KEPT_NONE, ZF_KEPT_FP32, ZF_KEPT_BF16, ZF_UNSIGNED, ZF_SIGNED, ZF_BESIDE
    int ZF_ADAMW, ZF_SGD, ZF_NESTEROV, ZF_LION, ZF_ADAGRAD, ZF_DIRECTION, ZF_MUON
    bint zf_supports(int isa)
    void zf_update_from(uintptr_t *addresses, int *how, uint32_t *dither, float *factors, size_t n, int threads, int isa)

cdef extern from "_sums_kernel.h" nogil:
    ctypedef struct zf_sum_args:
        float *acc
        const void *grad
        int grad_type, first
    ctypedef struct zf_skeleton_args:
        void *state[4]
        size_t width[4]
        const uint16_t *in_ "in"
        uint16_t *out
    int ZF_PARTS
    void zf_sum(zf_sum_args *args, size_t n, int threads, int isa, double *parts)
    void zf_skeleton(zf_skeleton_args *args, size_t n, int threads, int isa)

cdef extern from "_block_sums.h" nogil:
    void zf_block_sums(const char *data, size_t blocks, uint64_t *sums, int isa)

cdef extern from "_adafactor_kernel.h" nogil:
    void zf_factor_from(int sweep, uintptr_t *addresses, size_t *sizes, int *how, float *factors, size_t n, int threads,
                        int isa)


NONE, FP32, BF16, FP16 = ZF_NONE, ZF_FP32, ZF_BF16, ZF_FP16
NO_DECAY, DECOUPLED, L2 = ZF_NO_DECAY, ZF_DECOUPLED, ZF_L2
UNIT, SHARED = ZF_BLOCK, ZF_SHARED  # elements: what threads are dealt, and what shares a scale
PARTS = ZF_PARTS  # doubles that a sum of squares consists of
RULES = {"adamw": ZF_ADAMW, "sgd": ZF_SGD, "nesterov": ZF_NESTEROV, "lion": ZF_LION, "adagrad": ZF_ADAGRAD,
         "direction": ZF_DIRECTION, "muon": ZF_MUON}
NO_WEIGHTS, MASTER, HALVES, HALVES_TO_EVEN = ZF_NO_WEIGHTS, ZF_MASTER, ZF_HALVES, ZF_HALVES_TO_EVEN
KEPT_NONE, KEPT_FP32, KEPT_BF16 = ZF_KEPT_NONE, ZF_KEPT_FP32, ZF_KEPT_BF16
UNSIGNED, SIGNED, BESIDE = ZF_UNSIGNED, ZF_SIGNED, ZF_BESIDE
MOMENTS = ZF_MOMENTS  # that a state here has room for
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


def checked(int isa):
    """An index into INSTRUCTION_SETS that this CPU runs: the best one for -1."""
    return checked_isa(isa)


def writable(uintptr_t address):
    """Whether the memory at this address can be written."""
    return zf_writable(address)


cdef struct Update:
    uintptr_t at[14]
    int how[7]
    uint32_t dither[2]
    float k[13]
    size_t n
    int threads, isa


def update(
    addresses,               # INOUT of grad, [n], read only; out, [n], or 0; of the state, then of the new one, which may
                             #       be the same: [n] weights in fp32, or bf16: the high half, or 0; [n] int16, the low
                             #       half, or 0; two moments [n], or 0; their scales [ceil(n / 64)] int16, or 0
    how,                     # IN    rule, types of grad and out, decay; how weights and both moments are kept
    dithers,                 # IN    two: what rounding of compact moments adds, at a block's first element
    factors,                 # IN    zfunc.optim.rules.Factors: rounded here, once, to float
    size_t n,
    int threads,
    int isa=-1,
):
    """One step of an element-wise rule; rules.py says what it computes."""
    update_runs([(addresses, how, dithers, factors, n, threads, isa)])


def update_runs(calls):
    """A step for each of `calls`, the arguments of `update`, in order; Python's lock is given up once."""
    cdef size_t count = len(calls), c
    cdef Update *all = <Update *>malloc((count + 1) * sizeof(Update))
    cdef Update *one
    cdef int i
    if all == NULL:
        raise MemoryError(f"{count} updates")
    try:
        for c in range(count):
            one = all + c
            addresses, how, dithers, factors, n, threads, isa = calls[c]
            for i in range(14):
                one.at[i] = addresses[i]
            for i in range(7):
                one.how[i] = how[i]
            for i in range(2):
                one.dither[i] = dithers[i]
            for i in range(13):
                one.k[i] = <float><double>factors[i]
            one.n, one.threads, one.isa = n, threads, checked_isa(isa)
            assert 8 * 6 == sizeof(zf_state) and 4 * 13 == sizeof(zf_factors) and len(factors) == 13
        with nogil:
            for c in range(count):
                one = all + c
                zf_update_from(one.at, one.how, one.dither, one.k, one.n, one.threads, one.isa)
    finally:
        free(all)


LARGEST, FACTOR_SUMS, FACTOR_SQUARES, FACTORED = range(4)  # sweeps


def factor(
    int sweep,
    addresses,               # INOUT 16, as _adafactor_kernel.h has them, or 0
    sizes,                   # IN    rows and columns of a matrix
    how,                     # IN    types of grad and out, whether weights decay
    factors,                 # IN    grad_scale, grad_floor, limit, rate, decay: rounded here, once, to float
    size_t n,
    int threads,
    int isa=-1,
):
    """One sweep of Adafactor; see adafactor.py for what they compute together."""
    cdef uintptr_t at[16]
    cdef size_t count[2]
    cdef int numbers[3]
    cdef float k[5]
    cdef int use = checked_isa(isa), i
    for i in range(16):
        at[i] = addresses[i]
    count[0], count[1] = sizes
    for i in range(3):
        numbers[i] = how[i]
    for i in range(5):
        k[i] = <float><double>factors[i]
    with nogil:
        zf_factor_from(sweep, at, count, numbers, k, n, threads, use)


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
