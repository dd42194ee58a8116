/* The host kernel as a program of its own, without torch and Python: cases from stdin, buffers to stdout.
 *
 * Every buffer is a heap block that ends with its last byte, so a sanitizer sees one byte too far. stream.py
 * writes the cases and reads the buffers; the structs below are the format, in the byte order of the machine.
 * `kernel_cases describe` prints what the numbers in a case stand for, the instruction sets this CPU runs among
 * them: names are declared here or in the kernel, and nowhere else. */
#include <stdio.h>
#include <stdlib.h>

#include "_adafactor_kernel.h"
#include "_update_kernel.h"

/* The first 14 as zf_update_from takes them. */
#define ROLES(each)                                                                                          \
    each(grad) each(out) each(master) each(low) each(moment_0) each(moment_1) each(scale_0) each(scale_1)      \
    each(into_master) each(into_low) each(into_moment_0) each(into_moment_1) each(into_scale_0)                \
    each(into_scale_1) each(acc) each(rows) each(columns) each(new_rows) each(new_columns)
#define AS_ENUM(name) ROLE_##name,
#define AS_TEXT(name) #name,
enum { ROLES(AS_ENUM) NUM_ROLES };
static const char *const roles[] = {ROLES(AS_TEXT)};

typedef struct {
    uint32_t op, isa, threads, num_buffers, num_calls;
    int32_t how[7];
    uint32_t sizes[2]; /* dithers; of Adafactor the rows and columns of a matrix */
    double factor[13]; /* the factors of a reference, in its order */
} header;

typedef struct {
    uint32_t role, width, per, offset; /* `width` bytes for every `per` elements, `offset` bytes into its block */
    uint64_t bytes;
} buffer;

typedef struct {
    uint64_t begin, end; /* elements of one call of the kernel */
} span;

typedef struct {
    header h;
    buffer buffers[NUM_ROLES];
    char *blocks[NUM_ROLES]; /* of posix_memalign */
    span *calls;
} zf_case;

static void stop(const char *why) {
    fprintf(stderr, "kernel_cases: %s\n", why);
    exit(3);
}

/* ---- what a case can ask for ------------------------------------------------------------------------ */

/* Where the element at `begin` of a buffer is; NULL if the case has no such buffer. */
static void *at(const zf_case *c, uint32_t role, size_t begin) {
    for (uint32_t i = 0; i < c->h.num_buffers; i++) {
        const buffer *b = &c->buffers[i];
        if (b->role == role) return c->blocks[i] + b->offset + begin / b->per * b->width;
    }
    return NULL;
}

/* The roles of some addresses; the new state is the old one in a case without another. */
static void find(uintptr_t *address, const zf_case *c, const uint32_t *role, int count, size_t begin) {
    const int here = !at(c, ROLE_into_master, 0) && !at(c, ROLE_into_moment_0, 0);
    for (int i = 0; i < count; i++) {
        const uint32_t r = role ? role[i] : (uint32_t)i, into = r >= ROLE_into_master && r <= ROLE_into_scale_1;
        address[i] = (uintptr_t)at(c, here && into ? r - ROLE_into_master + ROLE_master : r, begin);
    }
}

static double run_update(const zf_case *c, size_t begin, size_t n) {
    uintptr_t address[14];
    float factor[13];
    find(address, c, NULL, 14, begin);
    for (int i = 0; i < 13; i++) factor[i] = (float)c->h.factor[i];
    zf_update_from(address, c->h.how, c->h.sizes, factor, n, (int)c->h.threads, (int)c->h.isa);
    return 0;
}

/* One sweep of Adafactor's, over all elements; the rate is that of the weights as they are. */
static double run_factor(const zf_case *c, size_t begin, size_t n) {
    static const uint32_t role[] = {ROLE_grad,     ROLE_new_rows,    ROLE_new_columns, ROLE_rows,
                                    ROLE_columns,  ROLE_new_rows,    ROLE_new_columns, ROLE_rows,
                                    ROLE_columns,  ROLE_new_rows,    ROLE_new_columns, ROLE_master,
                                    ROLE_low,      ROLE_into_master, ROLE_into_low,    ROLE_out};
    const size_t sizes[2] = {c->h.sizes[0], c->h.sizes[1]};
    uintptr_t address[16];
    float factor[5];
    find(address, c, role, 16, begin);
    for (int i = 0; i < 5; i++) factor[i] = (float)c->h.factor[i];
    zf_factor_from(c->h.how[0], address, sizes, c->h.how + 1, factor, n, (int)c->h.threads, (int)c->h.isa);
    return 0;
}

static double run_sum(const zf_case *c, size_t begin, size_t n) {
    zf_sum_args args = {.acc = at(c, ROLE_acc, begin),
                        .grad = at(c, ROLE_grad, begin),
                        .grad_type = c->h.how[0],
                        .first = c->h.how[1]};
    double parts[ZF_PARTS], sum = 0;
    zf_sum(&args, n, (int)c->h.threads, (int)c->h.isa, parts);
    for (int i = 0; i < ZF_PARTS; i++) sum += parts[i];
    return sum;
}

static double run_skeleton(const zf_case *c, size_t begin, size_t n) {
    const uint32_t state[4] = {ROLE_master, ROLE_low, ROLE_moment_0, ROLE_moment_1};
    zf_skeleton_args args = {.in = at(c, ROLE_grad, begin), .out = at(c, ROLE_out, begin)};
    int used = 0;
    for (int k = 0; k < 4; k++)
        for (uint32_t i = 0; i < c->h.num_buffers; i++)
            if (c->buffers[i].role == state[k]) {
                args.state[used] = at(c, state[k], begin);
                args.width[used++] = c->buffers[i].width;
            }
    zf_skeleton(&args, n, (int)c->h.threads, (int)c->h.isa);
    return 0;
}

/* Not the kernel: every thread writes one element, which a thread sanitizer that works has to report. */
static double run_race(const zf_case *c, size_t begin, size_t n) {
    float *x = at(c, ROLE_master, begin);
    (void)n;
#ifdef _OPENMP
#pragma omp parallel num_threads(c->h.threads)
#endif
    x[0] += 1;
    return 0;
}

static const struct {
    const char *name;
    double (*run)(const zf_case *, size_t begin, size_t n); /* a sum, or 0 */
} ops[] = {{"update", run_update}, {"factor", run_factor}, {"sum", run_sum}, {"skeleton", run_skeleton}, {"race", run_race}};

enum { NUM_OPS = sizeof ops / sizeof *ops };

#define CONSTANTS(each)                                                                                         \
    each("none", ZF_NONE) each("fp32", ZF_FP32) each("bf16", ZF_BF16) each("fp16", ZF_FP16)                      \
    each("no_decay", ZF_NO_DECAY) each("decoupled", ZF_DECOUPLED) each("l2", ZF_L2) each("adamw", ZF_ADAMW)      \
    each("sgd", ZF_SGD) each("nesterov", ZF_NESTEROV) each("lion", ZF_LION) each("adagrad", ZF_ADAGRAD)          \
    each("direction", ZF_DIRECTION) each("muon", ZF_MUON) each("NO_WEIGHTS", ZF_NO_WEIGHTS)                      \
    each("MASTER", ZF_MASTER) each("HALVES", ZF_HALVES) each("HALVES_TO_EVEN", ZF_HALVES_TO_EVEN)                \
    each("KEPT_NONE", ZF_KEPT_NONE) each("KEPT_FP32", ZF_KEPT_FP32) each("KEPT_BF16", ZF_KEPT_BF16)              \
    each("UNSIGNED", ZF_UNSIGNED) each("SIGNED", ZF_SIGNED) each("BESIDE", ZF_BESIDE) each("largest", 0)         \
    each("factor_sums", 1) each("factor_squares", 2) each("factored", 3)
#define DESCRIBE(name, value) printf("constant %s %d\n", name, value);

static void describe(void) {
    static const char *const sets[] = {"baseline", "avx2", "avx512"};
    for (int i = 0; i < ZF_NUM_ISA; i++)
        if (zf_supports(i)) printf("isa %s %d\n", sets[i], i);
    for (int i = 0; i < NUM_ROLES; i++) printf("role %s %d\n", roles[i], i);
    for (int i = 0; i < NUM_OPS; i++) printf("op %s %d\n", ops[i].name, i);
    CONSTANTS(DESCRIBE)
}

/* ---- the stream ------------------------------------------------------------------------------------- */

static void take(void *to, size_t bytes) {
    if (fread(to, 1, bytes, stdin) != bytes) stop("the input ended inside a case");
}

static void give(const void *from, size_t bytes) {
    if (fwrite(from, 1, bytes, stdout) != bytes) stop("the output could not be written");
}

/* A block on lines of the cache, as the new state has to be to bypass it. */
static void *allocate(size_t bytes) {
    void *block = NULL;
    if (posix_memalign(&block, 64, bytes)) stop("no memory for the buffers");
    return block;
}

/* 0 at the end of the input. */
static int next_case(zf_case *c) {
    size_t got = fread(&c->h, 1, sizeof c->h, stdin);
    if (!got) return 0;
    if (got != sizeof c->h) stop("the input ended inside a case");
    if (c->h.op >= NUM_OPS || c->h.num_buffers > NUM_ROLES) stop("this is not a case");
    if (c->h.isa >= ZF_NUM_ISA || !zf_supports((int)c->h.isa)) stop("this CPU does not run that instruction set");
    for (uint32_t i = 0; i < c->h.num_buffers; i++) {
        buffer *b = &c->buffers[i];
        take(b, sizeof *b);
        c->blocks[i] = allocate(b->offset + b->bytes);
        take(c->blocks[i] + b->offset, b->bytes);
    }
    c->calls = allocate(c->h.num_calls * sizeof *c->calls);
    take(c->calls, c->h.num_calls * sizeof *c->calls);
    return 1;
}

/* All buffers as they are now, after the sum of each call; freed. */
static void finish_case(zf_case *c) {
    for (uint32_t i = 0; i < c->h.num_buffers; i++) {
        give(c->blocks[i] + c->buffers[i].offset, c->buffers[i].bytes);
        free(c->blocks[i]);
    }
    free(c->calls);
    fflush(stdout); /* a sanitizer that ends the next case leaves this one readable */
}

int main(int count, char **words) {
    zf_case c;
    if (count == 2 && !strcmp(words[1], "describe")) {
        describe();
        return 0;
    }
    if (count != 1) stop("usage: kernel_cases < cases > buffers, or kernel_cases describe");
    while (next_case(&c)) {
        for (uint32_t i = 0; i < c.h.num_calls; i++) {
            span call = c.calls[i];
            double sum = ops[c.h.op].run(&c, call.begin, call.end - call.begin);
            give(&sum, sizeof sum);
        }
        finish_case(&c);
    }
    return 0;
}
