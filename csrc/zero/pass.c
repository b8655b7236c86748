/* SPDX-License-Identifier: Apache-2.0
 *
 * One pass of several backwards: the micro-batches of a pipeline, whose graphs may all be outstanding at once.
 *
 *   closed      a backward is a pass of its own: backward_begin .. backward_end
 *   open        pass_open .. (graph_begin .. grad(u, i, g) .. graph_end) for each graph .. pass_close
 *   unsettled   from pass_close to settle: reductions are under way, and no result may be read
 *
 * Forwards may come at any time of an open pass. A unit is reduced in the last graph that gives it gradients, and
 * neither the end of that graph nor that of the pass waits for the reduction: what the other stages wait for leaves
 * first. Sums are left until this thread waits for messages of other stages (zpp_zero_drive), or in settle, which is
 * called before a norm or a step: a sum inside the backward would be on the way of all p stages, one after the other.
 * With `each`, every graph is reduced at its end instead, so that whole gradients live for one graph alone.
 */
#include <string.h>

#include "internal.h"
#include "reduce.h"

zpp_status zpp_zero_pass_open(zpp_zero *zero, bool reduce, bool each, struct zpp_err *err) {
    if (zero->pass_is_open) return zpp_fail(err, ZPP_STATE, "zero: a pass opens inside an open pass");
    if (zero->unsettled) return zpp_fail(err, ZPP_STATE, "zero: a pass opens before the one before it was settled");
    const zpp_status status = each ? ZPP_OK : zpp_zero_backward_begin(zero, reduce, err);
    if (status != ZPP_OK) return status;
    zero->pass_is_open = true;
    zero->reduces_graphs = each;
    zero->pass_reduces = reduce;
    zero->defers = !each;
    for (int i = 0; i < zero->units_count; i++) zero->units[i]->awaits_graphs = !each;
    return ZPP_OK;
}

static void expect_gradients(struct zpp_unit *unit) {
    struct zpp_unit_grad *grad = unit->grad;
    if (!grad) return;
    memset(grad->seen, unit->masked, unit->params);
    grad->missing = unit->masked ? 0 : unit->params;
    grad->partial = false;
}

zpp_status zpp_zero_graph_begin(zpp_zero *zero, const uint8_t *units, int forwards, struct zpp_err *err) {
    if (!zero->pass_is_open) return zpp_fail(err, ZPP_STATE, "zero: a graph begins, and no pass is open");
    const zpp_status status = zero->reduces_graphs ? zpp_zero_backward_begin(zero, zero->pass_reduces, err) : ZPP_OK;
    if (status != ZPP_OK) return status;
    for (int i = 0; i < zero->units_count; i++) {
        struct zpp_unit *unit = zero->units[i];
        if (units[i] == ZPP_GRAPH_WITHOUT) continue;
        unit->forwards = forwards;
        if (zero->reduces_graphs) continue;
        expect_gradients(unit);
        unit->awaits_graphs = units[i] != ZPP_GRAPH_LAST;
    }
    return ZPP_OK;
}

zpp_status zpp_zero_graph_end(zpp_zero *zero, const struct zpp_wait *wait, struct zpp_err *err) {
    return zero->reduces_graphs ? zpp_zero_backward_end(zero, wait, err) : ZPP_OK;
}

bool zpp_zero_drive(zpp_zero *zero) {
    struct zpp_err ignored = ZPP_ERR_INIT;
    if (!zero->defers || !zero->order_at) return false;
    zero->may_sum = true; /* one of them: then the caller looks at its messages again */
    const zpp_status status = zpp_stream_poll(zero->reduce, &ignored); /* pass_close says what is wrong */
    zero->may_sum = false;
    return status == ZPP_AGAIN;
}

zpp_status zpp_zero_pass_close(zpp_zero *zero, const struct zpp_wait *wait, struct zpp_err *err) {
    if (!zero->pass_is_open) return ZPP_OK;
    const bool graphs = zero->reduces_graphs;
    const zpp_status status = graphs ? ZPP_OK : zpp_reduce_send_rest(zero, wait, err);
    if (status != ZPP_OK) return status;
    if (!graphs) zpp_span_end(zero->backward_ns, ZPP_SPAN_BACKWARD, "backward", 0);
    zero->in_backward = false;
    zpp_zero_pass_forget(zero);
    zpp_zero_reset_uses(zero);
    return ZPP_OK;
}
