/* SPDX-License-Identifier: Apache-2.0
 *
 * One entry a rank in the store of the rendezvous.
 */
#include <stdio.h>

#include "internal.h"

zpp_status zpp_store_publish(const struct zpp_comm *comm, const struct zpp_store *store, const char *name,
                             const void *entry, size_t bytes, struct zpp_err *err) {
    char key[32];
    snprintf(key, sizeof key, "zpp/%s/%d", name, comm->rank);
    return store->set(store->ctx, key, entry, bytes, err);
}

zpp_status zpp_store_read(const struct zpp_comm *comm, const struct zpp_store *store, const char *name, int rank,
                          void *entry, size_t *bytes, struct zpp_err *err) {
    char key[32];
    snprintf(key, sizeof key, "zpp/%s/%d", name, rank);
    const zpp_status status = store->get(store->ctx, key, entry, bytes, comm->timeout_ns, err);
    if (status != ZPP_OK && err) err->rank = rank;
    return status;
}
