/* SPDX-License-Identifier: Apache-2.0
 *
 * A rendezvous store for ranks that are threads of one process: a table, a lock and a condition.
 */
#ifndef ZPP_TESTS_STORE_TABLE_H
#define ZPP_TESTS_STORE_TABLE_H

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../../csrc/comm/comm.h"

enum { STORE_ENTRIES = 512, STORE_KEY_BYTES = 160, STORE_VALUE_BYTES = 1024 };

struct store_entry {
    char key[STORE_KEY_BYTES];
    unsigned char value[STORE_VALUE_BYTES];
    size_t bytes;
};

struct store_table {
    pthread_mutex_t lock; /* guards everything below */
    pthread_cond_t added;
    struct store_entry *entries;
    int count;
};

static inline void store_table_init(struct store_table *table) {
    pthread_mutex_init(&table->lock, NULL);
    pthread_cond_init(&table->added, NULL);
    table->entries = calloc(STORE_ENTRIES, sizeof *table->entries);
    table->count = 0;
    if (!table->entries) abort();
}

static inline void store_table_fini(struct store_table *table) {
    free(table->entries);
    pthread_cond_destroy(&table->added);
    pthread_mutex_destroy(&table->lock);
}

static inline struct store_entry *store_table_find(struct store_table *table, const char *key) {
    for (int i = 0; i < table->count; i++)
        if (strcmp(table->entries[i].key, key) == 0) return &table->entries[i];
    return NULL;
}

static inline zpp_status store_table_set(void *ctx, const char *key, const void *value, size_t bytes,
                                         struct zpp_err *err) {
    struct store_table *table = ctx;
    if (bytes > STORE_VALUE_BYTES || strlen(key) >= STORE_KEY_BYTES)
        return zpp_fail(err, ZPP_INVALID, "store: \"%s\" is too large", key);
    pthread_mutex_lock(&table->lock);
    struct store_entry *entry = store_table_find(table, key);
    if (!entry) {
        if (table->count == STORE_ENTRIES) abort();
        entry = &table->entries[table->count++];
    }
    snprintf(entry->key, sizeof entry->key, "%s", key);
    memcpy(entry->value, value, bytes);
    entry->bytes = bytes;
    pthread_cond_broadcast(&table->added);
    pthread_mutex_unlock(&table->lock);
    return ZPP_OK;
}

static inline zpp_status store_table_get(void *ctx, const char *key, void *value, size_t *bytes, uint64_t timeout_ns,
                                         struct zpp_err *err) {
    struct store_table *table = ctx;
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += (time_t)(timeout_ns ? timeout_ns / UINT64_C(1000000000) + 1 : 3600);
    pthread_mutex_lock(&table->lock);
    struct store_entry *entry;
    int late = 0;
    while (!(entry = store_table_find(table, key)) && !late)
        late = pthread_cond_timedwait(&table->added, &table->lock, &until);
    const int fits = entry && entry->bytes <= *bytes;
    if (fits) {
        memcpy(value, entry->value, entry->bytes);
        *bytes = entry->bytes;
    }
    pthread_mutex_unlock(&table->lock);
    if (!entry) return zpp_fail(err, ZPP_TIMEOUT, "store: nobody set \"%s\"", key);
    return fits ? ZPP_OK : zpp_fail(err, ZPP_INVALID, "store: \"%s\" does not fit", key);
}

static inline struct zpp_store store_table_of(struct store_table *table) {
    return (struct zpp_store){ .ctx = table, .set = store_table_set, .get = store_table_get };
}

#endif
