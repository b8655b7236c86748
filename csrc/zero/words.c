/* SPDX-License-Identifier: Apache-2.0
 *
 * What messages call a unit and what is reduced: by the names of modules, which the user gave, and not by our numbers.
 */
#include <stdio.h>
#include <string.h>

#include "internal.h"

enum { WORDS_MODULES = 3 }; /* that a message names, of a unit that several modules share */

const char *zpp_unit_words(const struct zpp_unit *unit, char *text, size_t room) {
    if (strcmp(unit->name, "(model)") == 0) {
        snprintf(text, room, "the model");
        return text;
    }
    /* Modules stand with a plus between them (python/zeropp/zero/units.py); a long list is cut off in the name. */
    const bool cut = strlen(unit->name) == sizeof unit->name - 1;
    const char *name = unit->name;
    int used = snprintf(text, room, "module%s ", strchr(name, '+') ? "s" : "");
    for (int i = 0; i < WORDS_MODULES && used >= 0 && (size_t)used < room; i++) {
        const size_t length = strcspn(name, "+");
        const bool last = name[length] == '\0';
        used += snprintf(text + used, room - (size_t)used, "%s'%.*s%s'", i ? ", " : "", (int)length, name,
                         last && cut ? "..." : "");
        if (last) return text;
        name += length + 1;
    }
    if (used >= 0 && (size_t)used < room) snprintf(text + used, room - (size_t)used, ", ...");
    return text;
}

void zpp_reduce_describe(void *ctx, const struct zpp_desc *desc, char *text, size_t room) {
    const zpp_zero *zero = ctx;
    const unsigned long long step = desc->step;
    const char *plural = step == 1 ? "" : "s";
    char words[ZPP_UNIT_WORDS] = "an unknown module";
    if (desc->kind == ZPP_DESC_NORM)
        snprintf(text, room, "the norm of the gradients after %llu backward%s", step, plural);
    else if (desc->kind == ZPP_DESC_STEP)
        snprintf(text, room, "a step after %llu backward%s", step, plural);
    else if (desc->kind == ZPP_NOTICE_BUFFERS)
        snprintf(text, room, "the model's buffers at the start of a forward (message %llu)", step);
    else {
        if (desc->object < (uint64_t)zero->units_count)
            zpp_unit_words(zero->units[desc->object], words, sizeof words);
        snprintf(text, room, "the %s of the gradient of %s in backward %llu",
                 desc->kind == ZPP_DESC_COPY ? "copy" : "reduction", words, step + 1);
    }
}
