/* SPDX-License-Identifier: Apache-2.0
 *
 * What training asks of a device beside kernels, tried once on a few MiB: for `python -m zeropp doctor --device cuda`,
 * and for the first use of a GPU.
 */
#ifndef ZPP_BASE_DEVICE_PROBE_H
#define ZPP_BASE_DEVICE_PROBE_H

#include "device.h"

enum zpp_device_probe {
    ZPP_PROBE_MEMORY,   /* filled, and copied to and from page-locked memory of the host */
    ZPP_PROBE_EVENTS,   /* a stream waits for an event of another */
    ZPP_PROBE_COUNTERS, /* a stream waits for a word of the host that another stream writes */
    ZPP_PROBE_WRAPPED,  /* one piece of memory at several addresses (wrap.h) */
    ZPP_DEVICE_PROBES
};

/* Words for a person, such as "waits for counters". */
const char *zpp_device_probe_name(enum zpp_device_probe probe);
/* Return OK, or why it does not work: DEVICE where what was read is not what was written. Takes at most `wait`. */
zpp_status zpp_device_probe(zpp_device *device, enum zpp_device_probe probe, const struct zpp_wait *wait,
                            struct zpp_err *err);

#endif
