/* The shortest tour of cities, by branch and bound: tsp PROCESSES CITIES. The processes take the beginnings of tours from a queue, and share
 * the length of the shortest tour that any of them has found. */

MAIN_ENV

#define CITIES_MAX 16

struct global {
    LOCKDEC(number_lock)
    LOCKDEC(queue)
    LOCKDEC(best_lock)
    BARDEC(meeting)
    int next, next_task, best;
    long began, ended;
};

static struct global *global;
static int distances[CITIES_MAX][CITIES_MAX];
static int processes, cities;

/* Follows a tour that has visited count cities, the last one at; best is the shortest that this process knows. */
static int search(unsigned visited, int count, int at, int length, int best) {
    if (length >= best)
        return best;
    if (count == cities) {
        length += distances[at][0];
        return length < best ? length : best;
    }
    for (int city = 1; city < cities; city++)
        if (!(visited & 1u << city))
            best = search(visited | 1u << city, count + 1, city, length + distances[at][city], best);
    return best;
}

static void work(void) {
    LOCK(global->number_lock)
    int me = global->next++;
    UNLOCK(global->number_lock)
    BARRIER(global->meeting, processes)
    if (me == 0)
        CLOCK(global->began)
    for (;;) {
        LOCK(global->queue)
        int task = global->next_task++;
        UNLOCK(global->queue)
        /* A task is the first three cities after city 0. */
        int way[3] = {task % cities, task / cities % cities, task / cities / cities};
        if (way[2] >= cities)
            break;
        unsigned visited = 1;
        int length = 0, at = 0, is_tour = 1;
        for (int step = 0; step < 3; step++) {
            is_tour = is_tour && !(visited & 1u << way[step]);
            visited |= 1u << way[step];
            length += distances[at][way[step]];
            at = way[step];
        }
        if (!is_tour)
            continue;
        LOCK(global->best_lock)
        int best = global->best;
        UNLOCK(global->best_lock)
        int found = search(visited, 4, at, length, best);
        if (found < best) {
            LOCK(global->best_lock)
            if (found < global->best)
                global->best = found;
            UNLOCK(global->best_lock)
        }
    }
    BARRIER(global->meeting, processes)
    if (me == 0)
        CLOCK(global->ended)
}

int main(int argc, char **argv) {
    MAIN_INITENV(, 0)
    cities = argc == 3 ? atoi(argv[2]) : 0;
    if (cities < 4 || cities > CITIES_MAX)
        return fprintf(stderr, "tsp PROCESSES CITIES (4 to %d)\n", CITIES_MAX), 2;
    processes = atoi(argv[1]);
    for (int from = 0; from < cities; from++)
        for (int to = 0; to < from; to++)
            distances[from][to] = distances[to][from] = 10 + (from * from * 7919 + to * 104729) % 90;
    global = (struct global *)G_MALLOC(sizeof(struct global));
    LOCKINIT(global->number_lock)
    LOCKINIT(global->queue)
    LOCKINIT(global->best_lock)
    BARINIT(global->meeting, processes)
    global->best = 1 << 30;
    CREATE(work, processes)
    WAIT_FOR_END(processes)
    printf("tsp %d: %d\n", cities, global->best);
    printf("%ld us\n", global->ended - global->began);
    MAIN_END
}
