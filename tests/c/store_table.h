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

enum { STORE_ENTRIES = 8192, STORE_KEY_BYTES = 160 };

struct store_entry {
    char key[STORE_KEY_BYTES]; /* "": free */
    unsigned char *value;      /* NULL: somebody waits for it */
    size_t bytes;
    pthread_cond_t set;
};

struct store_table {
    pthread_mutex_t lock; /* guards everything below */
    struct store_entry *entries;
};

static inline void store_table_init(struct store_table *table) {
    pthread_mutex_init(&table->lock, NULL);
    table->entries = calloc(STORE_ENTRIES, sizeof *table->entries);
    if (!table->entries) abort();
}

static inline void store_table_fini(struct store_table *table) {
    for (int i = 0; i < STORE_ENTRIES; i++) {
        if (!table->entries[i].key[0]) continue;
        free(table->entries[i].value);
        pthread_cond_destroy(&table->entries[i].set);
    }
    free(table->entries);
    pthread_mutex_destroy(&table->lock);
}

/* Return the entry of a key, without a value if it is new. */
static inline struct store_entry *store_table_find(struct store_table *table, const char *key) {
    unsigned at = 2166136261u;
    for (const char *letter = key; *letter; letter++) at = (at ^ (unsigned char)*letter) * 16777619u;
    for (int tried = 0; tried < STORE_ENTRIES; tried++) {
        struct store_entry *entry = &table->entries[(at + (unsigned)tried) % STORE_ENTRIES];
        if (strcmp(entry->key, key) == 0) return entry;
        if (entry->key[0]) continue;
        snprintf(entry->key, sizeof entry->key, "%s", key);
        pthread_cond_init(&entry->set, NULL);
        return entry;
    }
    abort();
}

static inline zpp_status store_table_set(void *ctx, const char *key, const void *value, size_t bytes,
                                         struct zpp_err *err) {
    struct store_table *table = ctx;
    unsigned char *copy = malloc(bytes + 1);
    if (!copy || strlen(key) >= STORE_KEY_BYTES) {
        free(copy);
        return zpp_fail(err, ZPP_INVALID, "store: \"%s\" is too large", key);
    }
    memcpy(copy, value, bytes);
    pthread_mutex_lock(&table->lock);
    struct store_entry *entry = store_table_find(table, key);
    free(entry->value);
    entry->value = copy;
    entry->bytes = bytes;
    pthread_cond_broadcast(&entry->set);
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
    struct store_entry *entry = store_table_find(table, key);
    for (int late = 0; !entry->value && !late;) late = pthread_cond_timedwait(&entry->set, &table->lock, &until);
    const int there = entry->value != NULL, fits = there && entry->bytes <= *bytes;
    if (fits) {
        memcpy(value, entry->value, entry->bytes);
        *bytes = entry->bytes;
    }
    pthread_mutex_unlock(&table->lock);
    if (!there) return zpp_fail(err, ZPP_TIMEOUT, "store: nobody set \"%s\"", key);
    return fits ? ZPP_OK : zpp_fail(err, ZPP_INVALID, "store: \"%s\" does not fit", key);
}

static inline struct zpp_store store_table_of(struct store_table *table) {
    return (struct zpp_store){ .ctx = table, .set = store_table_set, .get = store_table_get };
}

#endif
