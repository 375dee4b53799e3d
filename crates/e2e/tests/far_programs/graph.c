/* Breadth-first search and PageRank over an undirected Kronecker graph (Graph500: a 0.57, b 0.19, c 0.19) of 2^17 vertices, whose
   results it checks and prints. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { SCALE = 17, VERTICES = 1 << SCALE, EDGES = VERTICES * 8, PARTS = 16, ROUNDS = 4 };
#define CHECK(what, ...) do { if (!(what)) { fprintf(stderr, __VA_ARGS__); fprintf(stderr, "\n"); exit(1); } } while (0)

static uint64_t state = 0x9e3779b97f4a7c15;

static uint64_t next(void) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state * 0x2545f4914f6cdd1d;
}

static void *room(size_t count, size_t bytes) {
    void *made = calloc(count, bytes);
    CHECK(made, "no memory");
    return made;
}

/* The neighbours of v are at[first[v]] to at[first[v + 1]]. */
struct graph { uint64_t *first, *at; };

static struct graph kronecker(void) {
    uint64_t (*edges)[2] = room(EDGES, sizeof *edges);
    struct graph graph = {room(VERTICES + 2, 8), room(2 * (size_t)EDGES, 8)};
    for (uint64_t edge = 0; edge < EDGES; edge++)
        for (int bit = 0; bit < SCALE; bit++) {
            uint64_t part = next() % 100;
            edges[edge][0] = edges[edge][0] * 2 + (part >= 76);
            edges[edge][1] = edges[edge][1] * 2 + ((part >= 57 && part < 76) || part >= 95);
        }
    for (uint64_t edge = 0; edge < EDGES; edge++)
        graph.first[edges[edge][0] + 2]++, graph.first[edges[edge][1] + 2]++;
    for (uint64_t vertex = 2; vertex < VERTICES + 2; vertex++) graph.first[vertex] += graph.first[vertex - 1];
    /* Some vertices at a time, so that what is written lies close together. */
    for (uint64_t part = 0; part < PARTS; part++)
        for (uint64_t edge = 0; edge < EDGES; edge++)
            for (int end = 0; end < 2; end++)
                if (edges[edge][end] / (VERTICES / PARTS) == part)
                    graph.at[graph.first[edges[edge][end] + 1]++] = edges[edge][!end];
    free(edges);
    return graph;
}

static void search(struct graph graph) {
    int64_t *depth = room(VERTICES, 8);
    uint64_t *queue = room(VERTICES, 8), head = 0, tail = 0, at_depth[64] = {0};
    for (uint64_t vertex = 0; vertex < VERTICES; vertex++) depth[vertex] = -1;
    depth[queue[tail++] = 0] = 0;
    while (head < tail) {
        uint64_t vertex = queue[head++];
        at_depth[depth[vertex]]++;
        for (uint64_t at = graph.first[vertex]; at < graph.first[vertex + 1]; at++)
            if (depth[graph.at[at]] < 0) {
                depth[graph.at[at]] = depth[vertex] + 1;
                queue[tail++] = graph.at[at];
            }
    }
    for (uint64_t vertex = 0; vertex < VERTICES; vertex++)
        for (uint64_t at = graph.first[vertex]; at < graph.first[vertex + 1]; at++)
            CHECK(llabs(depth[vertex] - depth[graph.at[at]]) <= 1, "an edge from %ld to %ld", depth[vertex], depth[graph.at[at]]);
    for (int level = 0; level < 64 && at_depth[level]; level++) printf("%lu at depth %d\n", at_depth[level], level);
    free(depth), free(queue);
}

static void rank(struct graph graph) {
    double *ranks = room(VERTICES, 8), *shares = room(VERTICES, 8), total = 0, squares = 0;
    for (uint64_t vertex = 0; vertex < VERTICES; vertex++) ranks[vertex] = 1.0 / VERTICES;
    for (int round = 0; round < ROUNDS; round++) {
        double alone = 0;
        for (uint64_t vertex = 0; vertex < VERTICES; vertex++) {
            uint64_t degree = graph.first[vertex + 1] - graph.first[vertex];
            if (degree) shares[vertex] = ranks[vertex] / (double)degree; else alone += ranks[vertex];
        }
        for (uint64_t vertex = 0; vertex < VERTICES; vertex++) {
            double sum = alone / VERTICES;
            for (uint64_t at = graph.first[vertex]; at < graph.first[vertex + 1]; at++) sum += shares[graph.at[at]];
            ranks[vertex] = 0.15 / VERTICES + 0.85 * sum;
        }
    }
    for (uint64_t vertex = 0; vertex < VERTICES; vertex++) total += ranks[vertex], squares += ranks[vertex] * ranks[vertex];
    CHECK(total > 1 - 1e-9 && total < 1 + 1e-9, "the ranks are %a together", total);
    printf("ranks: %a, largest %a\n", squares, ranks[0]);
    free(ranks), free(shares);
}

int main(void) {
    struct graph graph = kronecker();
    CHECK(graph.first[VERTICES] == 2 * (uint64_t)EDGES, "%lu ends of edges", graph.first[VERTICES]);
    search(graph);
    rank(graph);
    return 0;
}
