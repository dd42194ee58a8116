/* Printed by `python -m zfunc.optim.by_name` from the rules of the optimizers: not to be edited. */

#ifndef ZF_RULES_H
#define ZF_RULES_H

enum { ZF_ADAMW = 0, ZF_SGD = 1, ZF_NESTEROV = 2, ZF_LION = 3, ZF_ADAGRAD = 4, ZF_DIRECTION = 5, ZF_MUON = 6 };

#define ZF_FACTORS(each) \
    each(grad_scale) \
    each(grad_floor) \
    each(decay) \
    each(rate) \
    each(keep) \
    each(add) \
    each(look_keep) \
    each(look_add) \
    each(keep_sq) \
    each(add_sq) \
    each(root_scale) \
    each(eps) \
    each(initial)

#define ZF_AS_FLOAT(name) float name;
typedef struct { ZF_FACTORS(ZF_AS_FLOAT) } zf_factors;

#define ZF_FLOOR_GRAD 0x23800000 /* bits of 1.3877787807814457e-17 */
#define ZF_FLOOR_EXP_AVG 0x0d800000 /* bits of 7.888609052210118e-31 */
#define ZF_FLOOR_EXP_AVG_SQ 0x03800000 /* bits of 7.52316384526264e-37 */

ZF_INLINE void zf_rule_adamw(const zf_factors *factors, int decay, size_t n,
    const float *restrict grad, float *restrict p, float *restrict exp_avg, float *restrict exp_avg_sq) {
    const zf_factors k = *factors;
    for (size_t i = 0; i < n; i++) {
        float g = zf_flush(grad[i], (int32_t)zf_bits(k.grad_floor)) * k.grad_scale;
        if (decay == ZF_L2) g = zf_flush(g + k.decay * p[i], ZF_FLOOR_GRAD);
        const float t0 = zf_flush(k.keep * exp_avg[i] + k.add * g, ZF_FLOOR_EXP_AVG);
        const float t1 = zf_flush(k.keep_sq * exp_avg_sq[i] + k.add_sq * (g * g), ZF_FLOOR_EXP_AVG_SQ);
        float change = k.rate * (t0 / (sqrtf(t1) * k.root_scale + k.eps));
        if (decay == ZF_DECOUPLED) change = change + k.decay * p[i];
        exp_avg[i] = t0;
        exp_avg_sq[i] = t1;
        p[i] = p[i] - change;
    }
}

ZF_INLINE void zf_rule_sgd(const zf_factors *factors, int decay, size_t n,
    const float *restrict grad, float *restrict p, float *restrict momentum_buffer) {
    const zf_factors k = *factors;
    for (size_t i = 0; i < n; i++) {
        float g = zf_flush(grad[i], (int32_t)zf_bits(k.grad_floor)) * k.grad_scale;
        if (decay == ZF_L2) g = zf_flush(g + k.decay * p[i], ZF_FLOOR_GRAD);
        const float t0 = zf_flush(k.keep * momentum_buffer[i] + k.add * g, ZF_FLOOR_EXP_AVG);
        float change = k.rate * t0;
        if (decay == ZF_DECOUPLED) change = change + k.decay * p[i];
        momentum_buffer[i] = t0;
        p[i] = p[i] - change;
    }
}

ZF_INLINE void zf_rule_nesterov(const zf_factors *factors, int decay, size_t n,
    const float *restrict grad, float *restrict p, float *restrict momentum_buffer) {
    const zf_factors k = *factors;
    for (size_t i = 0; i < n; i++) {
        float g = zf_flush(grad[i], (int32_t)zf_bits(k.grad_floor)) * k.grad_scale;
        if (decay == ZF_L2) g = zf_flush(g + k.decay * p[i], ZF_FLOOR_GRAD);
        const float t0 = zf_flush(k.keep * momentum_buffer[i] + k.add * g, ZF_FLOOR_EXP_AVG);
        float change = k.rate * (g + k.keep * t0);
        if (decay == ZF_DECOUPLED) change = change + k.decay * p[i];
        momentum_buffer[i] = t0;
        p[i] = p[i] - change;
    }
}

ZF_INLINE void zf_rule_lion(const zf_factors *factors, int decay, size_t n,
    const float *restrict grad, float *restrict p, float *restrict exp_avg) {
    const zf_factors k = *factors;
    for (size_t i = 0; i < n; i++) {
        float g = zf_flush(grad[i], (int32_t)zf_bits(k.grad_floor)) * k.grad_scale;
        if (decay == ZF_L2) g = zf_flush(g + k.decay * p[i], ZF_FLOOR_GRAD);
        const float t0 = zf_flush(k.keep * exp_avg[i] + k.add * g, ZF_FLOOR_EXP_AVG);
        float change = zf_signed(k.look_keep * exp_avg[i] + k.look_add * g, k.rate);
        if (decay == ZF_DECOUPLED) change = change + k.decay * p[i];
        exp_avg[i] = t0;
        p[i] = p[i] - change;
    }
}

ZF_INLINE void zf_rule_adagrad(const zf_factors *factors, int decay, size_t n,
    const float *restrict grad, float *restrict p, float *restrict sum) {
    const zf_factors k = *factors;
    for (size_t i = 0; i < n; i++) {
        float g = zf_flush(grad[i], (int32_t)zf_bits(k.grad_floor)) * k.grad_scale;
        if (decay == ZF_L2) g = zf_flush(g + k.decay * p[i], ZF_FLOOR_GRAD);
        const float t0 = sum[i] + g * g;
        float change = k.rate * (g / (sqrtf(t0 + k.initial) + k.eps));
        if (decay == ZF_DECOUPLED) change = change + k.decay * p[i];
        sum[i] = t0;
        p[i] = p[i] - change;
    }
}

ZF_INLINE void zf_rule_direction(const zf_factors *factors, int decay, size_t n,
    const float *restrict grad, float *restrict p, float *restrict momentum_buffer) {
    const zf_factors k = *factors;
    for (size_t i = 0; i < n; i++) {
        float g = zf_flush(grad[i], (int32_t)zf_bits(k.grad_floor)) * k.grad_scale;
        const float t0 = zf_flush(k.keep * momentum_buffer[i] + k.add * g, ZF_FLOOR_EXP_AVG);
        float change = k.look_keep * t0 + k.look_add * g;
        momentum_buffer[i] = t0;
        p[i] = change;
    }
}

ZF_INLINE void zf_rule_muon(const zf_factors *factors, int decay, size_t n,
    const float *restrict grad, float *restrict p) {
    const zf_factors k = *factors;
    for (size_t i = 0; i < n; i++) {
        float g = zf_flush(grad[i], (int32_t)zf_bits(k.grad_floor)) * k.grad_scale;
        if (decay == ZF_L2) g = zf_flush(g + k.decay * p[i], ZF_FLOOR_GRAD);
        float change = k.rate * zf_flush(0.0f + g, ZF_FLOOR_EXP_AVG);
        if (decay == ZF_DECOUPLED) change = change + k.decay * p[i];
        p[i] = p[i] - change;
    }
}

/* The rule of a call, over the elements of a block: of p and moments m, with gradients g. */
#define ZF_APPLY(a, p, m, g, n) \
    if (a->rule == ZF_ADAMW) ZF_BY_DECAY(zf_rule_adamw, p, m[0], m[1]); \
    else if (a->rule == ZF_SGD) ZF_BY_DECAY(zf_rule_sgd, p, m[0]); \
    else if (a->rule == ZF_NESTEROV) ZF_BY_DECAY(zf_rule_nesterov, p, m[0]); \
    else if (a->rule == ZF_LION) ZF_BY_DECAY(zf_rule_lion, p, m[0]); \
    else if (a->rule == ZF_ADAGRAD) ZF_BY_DECAY(zf_rule_adagrad, p, m[0]); \
    else if (a->rule == ZF_DIRECTION) ZF_BY_DECAY(zf_rule_direction, p, m[0]); \
    else if (a->rule == ZF_MUON) ZF_BY_DECAY(zf_rule_muon, p);

#endif

#ifdef ZF_RULES_OF_VECTORS
ZF_V_INLINE void v_adamw_keep(const v_call *k, vf *exp_avg, vf *exp_avg_sq) {
    *exp_avg = k->keep * *exp_avg;
    *exp_avg_sq = k->keep_sq * *exp_avg_sq;
}
ZF_V_INLINE void v_adamw_moments(const v_call *k, int codes, vf g, vf *exp_avg, vf *exp_avg_sq) {
    *exp_avg = *exp_avg + k->add * g;
    *exp_avg_sq = *exp_avg_sq + k->add_sq * (g * g);
    *exp_avg = v_flush(*exp_avg, k->size, k->floor_exp_avg);
    if (!codes) *exp_avg_sq = v_flush(*exp_avg_sq, k->size, k->floor_exp_avg_sq);
}
ZF_V_INLINE vf v_adamw_root(vf exp_avg, vf exp_avg_sq) {
    return v_sqrt(exp_avg_sq);
}
ZF_V_INLINE vf v_adamw_change(const v_call *k, vf exp_avg, vf exp_avg_sq, vf root) {
    return k->rate * (exp_avg / (root * k->root_scale + k->eps));
}
ZF_V_INLINE vf v_with_l2(const v_call *k, vf g, vf p) {
    return v_flush(g + k->decay * p, k->size, k->floor_grad);
}
#endif
