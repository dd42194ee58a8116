/* The host kernel as a program of its own, without torch and Python: cases from stdin, buffers to stdout.
 *
 * Every buffer is a heap block that ends with its last byte, so a sanitizer sees one byte too far. stream.py
 * writes the cases and reads the buffers; the structs below are the format, in the byte order of the machine.
 * `kernel_cases describe` prints what the numbers in a case stand for, the instruction sets this CPU runs among
 * them: names are declared here or in the kernel, and nowhere else. */
#include <stdio.h>
#include <stdlib.h>

#include "_adafactor_kernel.h"
#include "_one_buffer_kernel.h"

#define ROLES(each)                                                                                           \
    each(master) each(low) each(exp_avg) each(exp_avg_sq) each(exp_avg_sq_scale)                                \
    each(into_master) each(into_low) each(into_exp_avg) each(into_exp_avg_sq) each(into_exp_avg_sq_scale)      \
    each(buffer) each(scale) each(into_buffer) each(into_scale) each(grad) each(out) each(acc)              \
    each(rows) each(columns) each(new_rows) each(new_columns)
#define AS_ENUM(name) ROLE_##name,
#define AS_TEXT(name) #name,
enum { ROLES(AS_ENUM) NUM_ROLES };
static const char *const roles[] = {ROLES(AS_TEXT)};

typedef struct {
    uint32_t op, isa, threads, num_buffers, num_calls;
    int32_t moments, grad_type, out_type, decay_mode, first;
    uint32_t dither[2]; /* of Adafactor the rows and columns of a matrix */
    double factor[10]; /* the factors of a reference, in its order */
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

/* The buffers of a state, whose roles follow each other from that of its master on. */
static zf_state state_at(const zf_case *c, uint32_t master, size_t begin) {
    zf_state s = {
        .master = at(c, master, begin),
        .low = at(c, master + ROLE_low - ROLE_master, begin),
        .exp_avg = at(c, master + ROLE_exp_avg - ROLE_master, begin),
        .exp_avg_sq = at(c, master + ROLE_exp_avg_sq - ROLE_master, begin),
        .exp_avg_sq_scale = at(c, master + ROLE_exp_avg_sq_scale - ROLE_master, begin),
    };
    return s;
}

static double run_adam(const zf_case *c, size_t begin, size_t n) {
    const double *f = c->h.factor;
    const uint32_t into = at(c, ROLE_into_master, begin) ? ROLE_into_master : ROLE_master;
    zf_adam_args args = {
        .state = state_at(c, ROLE_master, begin),
        .into = state_at(c, into, begin),
        .grad = at(c, ROLE_grad, begin),
        .out = at(c, ROLE_out, begin),
        .moments = c->h.moments,
        .grad_type = c->h.grad_type,
        .out_type = c->h.out_type,
        .decay_mode = c->h.decay_mode,
        .exp_avg_dither = c->h.dither[0],
        .exp_avg_sq_dither = c->h.dither[1],
        .grad_scale = (float)f[0],
        .grad_floor = (float)f[1],
        .beta1 = (float)f[2],
        .one_minus_beta1 = (float)f[3],
        .beta2 = (float)f[4],
        .one_minus_beta2 = (float)f[5],
        .step_size = (float)f[6],
        .inv_sqrt_bias2 = (float)f[7],
        .eps = (float)f[8],
        .decay = (float)f[9],
    };
    zf_adam(&args, n, (int)c->h.threads, (int)c->h.isa);
    return 0;
}

/* SGD, Lion, Adagrad, Muon's direction: the op is the rule. */
static double run_one(const zf_case *c, size_t begin, size_t n) {
    const double *f = c->h.factor;
    const zf_one_state state = {.master = at(c, ROLE_master, begin),
                                .low = at(c, ROLE_low, begin),
                                .buffer = at(c, ROLE_buffer, begin),
                                .scale = at(c, ROLE_scale, begin)};
    const zf_one_state into = {.master = at(c, ROLE_into_master, begin),
                               .low = at(c, ROLE_into_low, begin),
                               .buffer = at(c, ROLE_into_buffer, begin),
                               .scale = at(c, ROLE_into_scale, begin)};
    zf_one_args args = {
        .state = state,
        .into = into.master ? into : state,
        .grad = at(c, ROLE_grad, begin),
        .out = at(c, ROLE_out, begin),
        .rule = (int)c->h.op,
        .buffer_type = c->h.moments,
        .grad_type = c->h.grad_type,
        .out_type = c->h.out_type,
        .decay_mode = c->h.decay_mode,
        .dither = c->h.dither[0],
        .grad_scale = (float)f[0],
        .grad_floor = (float)f[1],
        .rate = (float)f[2],
        .decay = (float)f[3],
        .keep = (float)f[4],
        .add = (float)f[5],
        .look_keep = (float)f[6],
        .look_add = (float)f[7],
        .eps = (float)f[8],
        .initial = (float)f[9],
    };
    zf_one(&args, n, (int)c->h.threads, (int)c->h.isa);
    return 0;
}

/* One sweep of Adafactor's, over all elements; the rate is that of the weights as they are. */
static zf_factor_args factor_args(const zf_case *c) {
    const double *f = c->h.factor;
    const zf_weights weights = {at(c, ROLE_master, 0), at(c, ROLE_low, 0)};
    const zf_weights into = {at(c, ROLE_into_master, 0), at(c, ROLE_into_low, 0)};
    const zf_factor_args args = {
        .grad = at(c, ROLE_grad, 0),
        .grad_type = c->h.grad_type,
        .rows = c->h.dither[0],
        .columns = c->h.dither[1],
        .grad_scale = (float)f[0],
        .grad_floor = (float)f[1],
        .limit = (float)f[5],
        .rate = (float)f[6],
        .decay = (float)f[9],
        .decays = c->h.decay_mode,
        .left = at(c, ROLE_rows, 0),
        .right = at(c, ROLE_columns, 0),
        .row_unit = at(c, ROLE_rows, 0),
        .column_unit = at(c, ROLE_columns, 0),
        .row_largest = at(c, ROLE_new_rows, 0),
        .column_largest = at(c, ROLE_new_columns, 0),
        .row_sum = at(c, ROLE_new_rows, 0),
        .column_sum = at(c, ROLE_new_columns, 0),
        .direction_squares = at(c, ROLE_new_rows, 0),
        .weight_squares = at(c, ROLE_new_columns, 0),
        .weights = weights,
        .into = into.master ? into : weights,
        .out = at(c, ROLE_out, 0),
        .out_type = c->h.out_type,
    };
    return args;
}

#define RUN_FACTOR(sweep)                                                   \
    static double run_##sweep(const zf_case *c, size_t begin, size_t n) {   \
        zf_factor_args args = factor_args(c);                               \
        (void)begin;                                                        \
        zf_##sweep(&args, n, (int)c->h.threads, (int)c->h.isa);             \
        return 0;                                                           \
    }
RUN_FACTOR(largest)
RUN_FACTOR(factor_sums)
RUN_FACTOR(factor_squares)
RUN_FACTOR(factored)

static double run_sum(const zf_case *c, size_t begin, size_t n) {
    zf_sum_args args = {.acc = at(c, ROLE_acc, begin),
                        .grad = at(c, ROLE_grad, begin),
                        .grad_type = c->h.grad_type,
                        .first = c->h.first};
    double parts[ZF_PARTS], sum = 0;
    zf_sum(&args, n, (int)c->h.threads, (int)c->h.isa, parts);
    for (int i = 0; i < ZF_PARTS; i++) sum += parts[i];
    return sum;
}

static double run_skeleton(const zf_case *c, size_t begin, size_t n) {
    const uint32_t state[4] = {ROLE_master, ROLE_low, ROLE_exp_avg, ROLE_exp_avg_sq};
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
} ops[] = {[ZF_SGD] = {"sgd", run_one},   [ZF_NESTEROV] = {"nesterov", run_one},
           [ZF_LION] = {"lion", run_one}, [ZF_ADAGRAD] = {"adagrad", run_one},
           [ZF_DIRECTION] = {"direction", run_one},
           {"adam", run_adam},            {"sum", run_sum},
           {"skeleton", run_skeleton},    {"race", run_race},
           {"largest", run_largest},      {"factor_sums", run_factor_sums},
           {"factor_squares", run_factor_squares}, {"factored", run_factored}};

enum { NUM_OPS = sizeof ops / sizeof *ops };

static void describe(void) {
    static const char *const sets[] = {"baseline", "avx2", "avx512"};
    for (int i = 0; i < ZF_NUM_ISA; i++)
        if (zf_supports(i)) printf("isa %s %d\n", sets[i], i);
    for (int i = 0; i < NUM_ROLES; i++) printf("role %s %d\n", roles[i], i);
    for (int i = 0; i < NUM_OPS; i++) printf("op %s %d\n", ops[i].name, i);
    printf("type none %d\ntype fp32 %d\ntype bf16 %d\ntype fp16 %d\n", ZF_NONE, ZF_FP32, ZF_BF16, ZF_FP16);
    printf("decay none %d\ndecay decoupled %d\ndecay l2 %d\n", ZF_NO_DECAY, ZF_DECOUPLED, ZF_L2);
    printf("moments fp32 %d\nmoments 16bit %d\n", ZF_MOMENTS_FP32, ZF_MOMENTS_16BIT);
    printf("moments 8bit %d\nmoments fp32-split %d\n", ZF_MOMENTS_8BIT, ZF_MOMENTS_FP32_SPLIT);
    printf("moments buffer-none %d\nmoments buffer-fp32 %d\n", ZF_BUFFER_NONE, ZF_BUFFER_FP32);
    printf("moments buffer-bf16 %d\n", ZF_BUFFER_BF16);
    printf("moments buffer-signed %d\nmoments buffer-unsigned %d\n", ZF_BUFFER_SIGNED, ZF_BUFFER_UNSIGNED);
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
