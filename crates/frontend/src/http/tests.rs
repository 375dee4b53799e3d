use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Mutex;

use byway_reactor::MappedMemory;

use super::*;

/// Name, type and samples of a metric: a series with its labels, and its value.
type Family<'a> = (&'a str, &'a str, Vec<(&'a str, Labels, f64)>);
type Labels = Vec<(String, String)>;

/// Reads a page strictly: all that the exposition format (0.0.4) asks for, and Prometheus's conventions for names and units.
/// Gives the samples by name and labels.
fn parse(page: &str) -> BTreeMap<String, String> {
    assert!(page.ends_with('\n'));
    let mut families: Vec<Family<'_>> = Vec::new();
    let mut samples = BTreeMap::new();
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        if let Some(help) = line.strip_prefix("# HELP ") {
            let (name, text) = help.split_once(' ').expect(line);
            let kind = lines.next().and_then(|kind| kind.strip_prefix(&format!("# TYPE {name} "))).expect(line);
            assert!(text.ends_with('.') && !text.contains('\\'), "{line}");
            assert!(name.starts_with("byway_") && name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_'), "{line}");
            assert_eq!(kind == "counter", name.ends_with("_total"), "{line}");
            assert!(["counter", "gauge", "histogram"].contains(&kind), "{line}");
            assert!(
                ["micro", "milli", "nano", "_count", "_sum", "_bucket"].iter().all(|part| !name.contains(part)),
                "{line}"
            );
            assert!(families.iter().all(|(other, ..)| *other != name), "twice: {line}");
            families.push((name, kind, Vec::new()));
            continue;
        }
        let (series, value) = line.rsplit_once(' ').expect(line);
        let number: f64 = value.parse().expect(line);
        assert!(number >= 0.0, "{line}");
        let (name, labels) = series.split_once('{').map_or((series, Vec::new()), |(name, rest)| (name, labels(rest)));
        let (family, kind, of_family) = families.last_mut().expect(line);
        let parts = ["_bucket", "_sum", "_count"].iter().any(|part| name.strip_suffix(part) == Some(family));
        assert!(if *kind == "histogram" { parts } else { name == *family }, "not beside its head: {line}");
        of_family.push((name, labels, number));
        assert!(samples.insert(series.to_owned(), value.to_owned()).is_none(), "twice: {line}");
    }
    families.iter().filter(|(_, kind, _)| *kind == "histogram").for_each(check_histograms);
    samples
}

/// What stands between the braces: `name="text",...`, with `\\`, `\"` and a line's end escaped.
fn labels(text: &str) -> Labels {
    let mut chars = text.chars();
    let mut labels: Labels = Vec::new();
    loop {
        let name: String = chars.by_ref().take_while(|c| *c != '=').collect();
        assert!(!name.is_empty() && name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_'), "{text}");
        assert!(labels.iter().all(|(other, _)| *other != name), "{text}");
        assert_eq!(chars.next(), Some('"'), "{text}");
        let mut value = String::new();
        loop {
            match chars.next().expect(text) {
                '"' => break,
                '\\' => value.push(match chars.next() {
                    Some('n') => '\n',
                    Some(c @ ('"' | '\\')) => c,
                    other => panic!("{other:?} is escaped: {text}"),
                }),
                c => value.push(c),
            }
        }
        labels.push((name, value));
        match chars.next() {
            Some(',') => {}
            Some('}') => break,
            other => panic!("{other:?} after a label: {text}"),
        }
    }
    assert_eq!(chars.next(), None, "{text}");
    labels
}

/// Buckets grow with their bounds up to `+Inf`, which counts all.
fn check_histograms((name, _, samples): &Family<'_>) {
    let (mut bounds, mut below) = (f64::NEG_INFINITY, 0.0);
    for (series, labels, value) in samples {
        match series.strip_prefix(name) {
            Some("_bucket") => {
                let (le, bound) = labels.last().expect("a bound");
                let bound: f64 = bound.parse().expect(bound);
                assert!(le == "le" && bound > bounds && *value >= below, "{series} {labels:?}");
                (bounds, below) = (bound, *value);
            }
            Some("_sum") => assert!(bounds.is_infinite(), "{series} {labels:?}: no bucket counts all"),
            Some("_count") => {
                assert!((*value - below).abs() < 0.5, "{series} {labels:?}");
                (bounds, below) = (f64::NEG_INFINITY, 0.0);
            }
            _ => panic!("{series}"),
        }
    }
}

fn example() -> Snapshot {
    let volume = VolumeSnapshot { name: "disk".to_owned(), reads: 7, read_bytes: 28672, ..VolumeSnapshot::default() };
    let share = ShareSnapshot { name: "home".to_owned(), syncs: 3, ..ShareSnapshot::default() };
    let frontend = FrontendSnapshot { name: "nbd".to_owned(), connections: 2, ..FrontendSnapshot::default() };
    let far = PeerSnapshot { peer: "10.0.0.7".to_owned(), round_trip_us: Some(30), ..PeerSnapshot::default() };
    let local = PeerSnapshot { peer: "local".to_owned(), ..PeerSnapshot::default() };
    let mut delays = byway_fabric::feedback::Delays::default();
    (delays.start.counts[0], delays.start.counts[1]) = (3, 2);
    delays.stalls[0].total = std::time::Duration::from_millis(1500);
    Snapshot {
        delays,
        peers: vec![far, local],
        version: "1 \"quoted\"\\".to_owned(),
        io: "uring".to_owned(),
        counters: byway_reactor::Counters { sent_copied_bytes: 5, ..Default::default() },
        mapped: Some(MappedMemory { limit_bytes: 32, dropped_bytes: 64 }),
        frontends: vec![frontend],
        volumes: vec![volume],
        shares: vec![share],
        slow: vec![SlowOperation { took_us: 9, operation: "read".to_owned(), ..SlowOperation::default() }],
        ..Snapshot::default()
    }
}

#[test]
fn the_metrics_page_parses() {
    let samples = parse(&render(&example()));
    assert_eq!(samples["byway_volume_reads_total{volume=\"disk\"}"], "7");
    assert_eq!(samples["byway_share_calls_total{share=\"home\",kind=\"sync\"}"], "3");
    assert_eq!(samples["byway_connections{frontend=\"nbd\"}"], "2");
    assert_eq!(samples["byway_moved_bytes_total{path=\"send\",by=\"copied\"}"], "5");
    assert_eq!(samples["byway_mmap_limit_bytes"], "32");
    assert_eq!(samples["byway_mmap_released_bytes_total"], "64");
    assert_eq!(samples["byway_ready"], "1");
    let bucket = |le: &str| &samples[&format!("byway_transfer_delay_seconds_bucket{{wait=\"start\",le=\"{le}\"}}")];
    assert_eq!(
        (bucket("0.000002"), bucket("0.000004"), bucket("+Inf")),
        (&"3".to_owned(), &"5".to_owned(), &"5".to_owned())
    );
    assert_eq!(samples["byway_transfer_delay_seconds_count{wait=\"start\"}"], "5");
    assert_eq!(samples["byway_stalled_seconds_total{for=\"frames\"}"], "1.5");
    assert_eq!(samples["byway_peer_round_trip_seconds{peer=\"10.0.0.7\"}"], "0.00003");
    assert!(!samples.contains_key("byway_peer_round_trip_seconds{peer=\"local\"}"), "no path");
    assert!(samples.contains_key("byway_info{version=\"1 \\\"quoted\\\"\\\\\",io=\"uring\"}"));
}

struct Node(Mutex<Snapshot>);

impl Report for Node {
    fn snapshot(&self) -> Snapshot {
        self.0.lock().unwrap().clone()
    }
}

fn get(address: SocketAddr, path: &str) -> (String, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(std::time::Duration::from_secs(10))).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.lines().next().unwrap().to_owned(), body.to_owned())
}

#[test]
fn the_door_answers_and_closes() {
    let node = Arc::new(Node(Mutex::new(example())));
    let frontend =
        HttpFrontend::open("127.0.0.1:0".parse().unwrap(), Arc::clone(&node) as Arc<dyn Report>, |_| true).unwrap();
    let address = frontend.address();
    assert_eq!(get(address, "/healthz"), ("HTTP/1.1 200 OK".to_owned(), "ok\n".to_owned()));
    assert!(parse(&get(address, "/metrics").1).len() > 20);
    assert!(get(address, "/slow").1.contains("\"took_us\":9"));
    assert!(get(address, "/").0.contains("404"));
    node.0.lock().unwrap().volumes[0].flush_failed = true;
    let (status, body) = get(address, "/healthz");
    assert!(status.contains("503") && body.contains("volume disk: a flush failed"), "{status}: {body}");
    node.0.lock().unwrap().volumes[0].flush_failed = false;
    node.0.lock().unwrap().not_ready = Some("draining".to_owned());
    let (status, body) = get(address, "/healthz");
    assert!(status.contains("503") && body == "draining\n", "{status}: {body}");
    let idle = TcpStream::connect(address).unwrap();
    frontend.close();
    drop(idle);
    assert!(TcpStream::connect(address).is_err(), "nobody listens any more");
}

#[test]
fn half_requests_hold_up_no_whole_one() {
    let node = Arc::new(Node(Mutex::new(example())));
    let frontend = HttpFrontend::open("127.0.0.1:0".parse().unwrap(), node, |_| true).unwrap();
    let silent: Vec<_> = (0..10 * crate::limits::HTTP_CONNECTIONS_MAX)
        .map(|_| TcpStream::connect(frontend.address()).unwrap())
        .collect();
    for mut stream in &silent {
        stream.write_all(b"GET /healthz HTT").unwrap();
    }
    assert_eq!(get(frontend.address(), "/healthz"), ("HTTP/1.1 200 OK".to_owned(), "ok\n".to_owned()));
    let mut first = &silent[0];
    first.set_read_timeout(Some(std::time::Duration::from_secs(60))).unwrap();
    assert!(matches!(first.read(&mut [0; 1]), Ok(0) | Err(_)), "closed, and nothing said");
}

#[test]
fn strangers_are_turned_away() {
    let node = Arc::new(Node(Mutex::new(example())));
    let frontend = HttpFrontend::open("127.0.0.1:0".parse().unwrap(), node, |_| false).unwrap();
    let mut stream = TcpStream::connect(frontend.address()).unwrap();
    stream.set_read_timeout(Some(std::time::Duration::from_secs(10))).unwrap();
    let _ = stream.write_all(b"GET /healthz HTTP/1.1\r\n\r\n");
    assert!(matches!(stream.read(&mut [0; 1]), Ok(0) | Err(_)));
}
