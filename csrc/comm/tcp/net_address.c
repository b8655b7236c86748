/* SPDX-License-Identifier: Apache-2.0
 *
 * The address that a rank listens on and connects from, and the identity of its host.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "net.h"

void zpp_net_describe(const struct sockaddr_storage *address, char *text, size_t capacity) {
    char address_text[INET6_ADDRSTRLEN] = "?";
    if (address->ss_family == AF_INET6) {
        const struct sockaddr_in6 *six = (const struct sockaddr_in6 *)(const void *)address;
        inet_ntop(AF_INET6, &six->sin6_addr, address_text, sizeof address_text);
        snprintf(text, capacity, "[%s]:%u", address_text, (unsigned)ntohs(six->sin6_port));
    } else {
        const struct sockaddr_in *four = (const struct sockaddr_in *)(const void *)address;
        inet_ntop(AF_INET, &four->sin_addr, address_text, sizeof address_text);
        snprintf(text, capacity, "%s:%u", address_text, (unsigned)ntohs(four->sin_port));
    }
}

static void take(const struct sockaddr *from, const char *interface, struct zpp_net_address *out) {
    memset(out, 0, sizeof *out);
    out->length = from->sa_family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
    memcpy(&out->address, from, out->length);
    if (from->sa_family == AF_INET6)
        ((struct sockaddr_in6 *)(void *)&out->address)->sin6_port = 0;
    else
        ((struct sockaddr_in *)(void *)&out->address)->sin_port = 0;
    snprintf(out->interface, sizeof out->interface, "%s", interface);
}

static bool is_link_local(const struct sockaddr *address) {
    return address->sa_family == AF_INET6 &&
           IN6_IS_ADDR_LINKLOCAL(&((const struct sockaddr_in6 *)(const void *)address)->sin6_addr);
}

static bool is_internet(const struct sockaddr *address) {
    return address->sa_family == AF_INET || address->sa_family == AF_INET6;
}

/* The address family of `options`: 4, 6, or 0 for both. */
static int family_of(const struct zpp_network_options *options) {
    return options->family == 6 ? AF_INET6 : options->family == 4 ? AF_INET : AF_UNSPEC;
}

/* Rank an address: lower is better, -1 is unusable. IPv4 before IPv6, unless `family` says otherwise; a link-local
 * address only as a last resort. */
static int rank_address(const struct ifaddrs *entry, const struct zpp_network_options *options) {
    const bool named = options->interface && options->interface[0];
    const int family = entry->ifa_addr->sa_family, wanted = family_of(options);
    if (!(entry->ifa_flags & IFF_UP) || !is_internet(entry->ifa_addr)) return -1;
    if (named && strcmp(entry->ifa_name, options->interface) != 0) return -1;
    if (wanted != AF_UNSPEC && wanted != family) return -1;
    int score = (family == AF_INET6) != (wanted == AF_INET6);
    if (is_link_local(entry->ifa_addr)) score += 2;
    if (!named && (entry->ifa_flags & IFF_LOOPBACK)) score += 4;
    return score;
}

static zpp_status no_address(const struct zpp_network_options *options, const char *names, struct zpp_err *err) {
    return zpp_fail(err, ZPP_INVALID,
                    "comm: no address%s%s on network interface \"%s\" that is up; interfaces with addresses: %s (set "
                    "ZEROPP_IFNAME to one of them)",
                    options->family ? " of family IPv" : "", options->family == 6 ? "6" : options->family ? "4" : "",
                    options->interface && options->interface[0] ? options->interface : "any",
                    names[0] ? names : "none");
}

static zpp_status from_list(const struct zpp_network_options *options, struct zpp_net_address *out,
                            struct zpp_err *err) {
    struct ifaddrs *list = NULL;
    const struct ifaddrs *best = NULL;
    char names[256] = "";
    size_t used = 0;
    int best_score = 100;
    if (getifaddrs(&list) != 0) return zpp_fail_os(err, errno, "comm: the network interfaces cannot be listed");
    for (const struct ifaddrs *entry = list; entry; entry = entry->ifa_next) {
        if (!entry->ifa_addr) continue;
        const int score = rank_address(entry, options);
        if (is_internet(entry->ifa_addr) && used < sizeof names)
            used += (size_t)snprintf(names + used, sizeof names - used, "%s%s", used ? ", " : "", entry->ifa_name);
        if (score < 0 || score >= best_score) continue;
        best = entry;
        best_score = score;
    }
    if (best) take(best->ifa_addr, best->ifa_name, out);
    freeifaddrs(list);
    return best ? ZPP_OK : no_address(options, names, err);
}

/* Find the address that the kernel would send from: connecting a datagram socket returns it without sending
 * anything. */
static bool ask_route(const struct addrinfo *toward, struct sockaddr_storage *here) {
    socklen_t length = sizeof *here;
    const int probe = socket(toward->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (probe < 0) return false;
    const bool found = connect(probe, toward->ai_addr, toward->ai_addrlen) == 0 &&
                       getsockname(probe, (struct sockaddr *)here, &length) == 0;
    close(probe);
    return found;
}

/* Find the interface that leads to the job's store: IPv4 first, unless the options say otherwise. */
static bool from_route(const struct zpp_network_options *options, struct zpp_net_address *out) {
    const struct addrinfo hints = {.ai_socktype = SOCK_DGRAM, .ai_family = family_of(options)};
    struct addrinfo *list = NULL;
    bool found = false;
    if (getaddrinfo(options->toward, "9", &hints, &list) != 0) return false;
    for (int wanted = options->family == 6 ? 0 : AF_INET; !found; wanted = 0) {
        for (const struct addrinfo *entry = list; entry && !found; entry = entry->ai_next) {
            struct sockaddr_storage here = {0};
            if (wanted && entry->ai_family != wanted) continue;
            found = ask_route(entry, &here);
            if (found) take((const struct sockaddr *)&here, "", out);
        }
        if (!wanted) break;
    }
    freeaddrinfo(list);
    return found;
}

zpp_status zpp_net_choose(const struct zpp_network_options *options, struct zpp_net_address *out,
                          struct zpp_err *err) {
    const bool named = options->interface && options->interface[0];
    if (options->family != 0 && options->family != 4 && options->family != 6)
        return zpp_fail(err, ZPP_INVALID, "comm: ZEROPP_IP_FAMILY is %d, wanted 4 or 6", options->family);
    if (!named && options->toward && options->toward[0] && from_route(options, out)) return ZPP_OK;
    return from_list(options, out, err);
}

static bool same_address(const struct sockaddr *a, const struct sockaddr_storage *b) {
    if (!a || a->sa_family != b->ss_family) return false;
    if (a->sa_family == AF_INET6)
        return IN6_ARE_ADDR_EQUAL(&((const struct sockaddr_in6 *)(const void *)a)->sin6_addr,
                                  &((const struct sockaddr_in6 *)(const void *)b)->sin6_addr);
    return a->sa_family == AF_INET && ((const struct sockaddr_in *)(const void *)a)->sin_addr.s_addr ==
                                          ((const struct sockaddr_in *)(const void *)b)->sin_addr.s_addr;
}

void zpp_net_interface_of(int socket, char *name, size_t capacity) {
    struct sockaddr_storage here = {0};
    socklen_t length = sizeof here;
    struct ifaddrs *list = NULL;
    name[0] = '\0';
    if (getsockname(socket, (struct sockaddr *)&here, &length) != 0 || getifaddrs(&list) != 0) return;
    for (const struct ifaddrs *entry = list; entry && !name[0]; entry = entry->ifa_next)
        if (same_address(entry->ifa_addr, &here)) snprintf(name, capacity, "%s", entry->ifa_name);
    freeifaddrs(list);
}

bool zpp_net_has_link(int socket, const char *interface) {
    struct ifreq asked = {0}; /* of the socket's network namespace, which may differ from the thread's */
    snprintf(asked.ifr_name, sizeof asked.ifr_name, "%s", interface);
    if (ioctl(socket, SIOCGIFFLAGS, &asked) != 0) return errno != ENODEV;
    return (asked.ifr_flags & IFF_UP) && (asked.ifr_flags & IFF_RUNNING);
}

static void read_boot_id(char *out, size_t capacity) {
    const int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    const ssize_t got = fd < 0 ? 0 : read(fd, out, capacity - 1);
    if (fd >= 0) close(fd);
    out[got > 0 ? got : 0] = '\0';
    out[strcspn(out, "\n")] = '\0';
    if (!out[0]) gethostname(out, capacity - 1); /* without /proc, use the host name */
}

void zpp_net_identity(const struct zpp_network_options *options, char *out, size_t capacity) {
    char boot_id[48] = "";
    struct stat space;
    if (options->host_id && options->host_id[0]) {
        snprintf(out, capacity, "=%s", options->host_id);
        return;
    }
    read_boot_id(boot_id, sizeof boot_id);
    /* The abstract Unix sockets of the rendezvous belong to a network namespace. */
    const bool known = stat("/proc/self/ns/net", &space) == 0;
    snprintf(out, capacity, "%s/%llx", boot_id, known ? (unsigned long long)space.st_ino : 0ull);
}
