use std::io::Write;

use clap::Parser;

use super::*;

#[derive(Parser)]
struct Flags {
    #[command(flatten)]
    serve: ServeArguments,
}

fn load(flags: &[&str], file: Option<&str>) -> Result<Configuration, String> {
    let mut all = vec!["serve"];
    all.extend(flags);
    let mut config = tempfile::NamedTempFile::new().unwrap();
    let path = config.path().to_str().unwrap().to_owned();
    if let Some(text) = file {
        config.write_all(text.as_bytes()).unwrap();
        all.extend(["--config", &path]);
    }
    let parsed = Flags::try_parse_from(all).map_err(|error| error.to_string())?;
    Configuration::load(&parsed.serve).map_err(|error| error.to_string().replace(&path, "FILE"))
}

#[test]
fn a_file_and_flags_are_merged() {
    let file = r#"
        listen = ["tcp://127.0.0.1"]
        buffer_memory = "128M"
        mmap_limit = "1G"
        threads = 3
        volumes = ["a=mem:1M,ro"]
        [volume.b]
        store = "/srv/b.img"
        direct = true
        rate = "1M/s"
    "#;
    let got = load(&["--volume", "c=null:1G", "--threads", "2", "--nbd", "unix:///run/n"], Some(file)).unwrap();
    let names: Vec<_> = got.volumes.iter().map(|volume| volume.name.as_str()).collect();
    assert_eq!(names, ["a", "b", "c"]);
    assert!(got.volumes[1].direct);
    assert_eq!(got.volumes[1].rate_bytes_per_second, Some(1 << 20));
    assert_eq!((got.threads, got.frame_bytes), (Some(2), 128 << 20));
    assert_eq!((got.mapped_bytes, load(&[], None).unwrap().mapped_bytes), (Some(1 << 30), None));
    assert_eq!(load(&["--mmap-limit", "2G"], Some(file)).unwrap().mapped_bytes, Some(2 << 30));
    assert_eq!(got.listen[0].to_string(), "tcp://127.0.0.1:4711");
    assert_eq!(got.nbd, [Listen::parse("unix:///run/n", NBD_PORT).unwrap()]);
    assert_eq!(load(&[], None).unwrap().frame_bytes, DEFAULT_FRAME_BYTES);
}

/// Every key is in the sample: a new one does not compile here until it is.
#[test]
fn the_sample_is_good_as_it_stands_and_with_all_that_it_shows() {
    let sample = include_str!("../../../../dist/byway.toml");
    let got = load(&[], Some(sample)).unwrap();
    assert_eq!((got.volumes.len(), got.listen.len(), got.nbd.len()), (1, 1, 1));
    // What is explained has a space behind its mark; what is not set has none, or begins a text.
    let is_key = |rest: &&str| !rest.starts_with(' ') || rest.trim_start().starts_with('"');
    let shown: Vec<&str> = sample.lines().map(|line| line.strip_prefix('#').filter(is_key).unwrap_or(line)).collect();
    let all = shown.join("\n");
    let got = load(&[], Some(&all)).unwrap();
    assert_eq!(got.volumes.len(), 4);
    let form: FileForm = toml::from_str(&all).unwrap();
    let FileForm {
        listen,
        nbd,
        http,
        control_socket,
        io,
        buffer_memory,
        mmap_limit,
        stage,
        lend,
        threads,
        volumes,
        mut volume,
        shares,
        mut share,
        tls,
        allow,
        insecure,
        user,
        slow_us,
    } = form;
    assert!(![listen, nbd, volumes, shares, allow].iter().any(Vec::is_empty) && !insecure);
    assert!([http, io, buffer_memory, mmap_limit, stage, lend, user].iter().all(Option::is_some));
    assert!(control_socket.is_some() && threads.is_some());
    let Tls { certificate: _, key: _, client_ca, crl, clients, mode } = tls.unwrap();
    assert_eq!(
        (client_ca.is_some() && crl.is_some(), clients, mode),
        (true, Some(ClientAuthentication::Required), TlsMode::default())
    );
    assert_eq!(slow_us, Some(DEFAULT_SLOW_US));
    let VolumeForm { store: _, read_only, direct, stage, tls_required, rate, access, shared, format, description } =
        volume.remove("data").unwrap();
    assert_eq!((read_only, direct, tls_required, shared), (false, true, false, false));
    assert!([stage, rate, format, description].iter().all(Option::is_some) && access.is_some());
    // `users` is shown as text: beside `user` it is refused.
    let ShareForm { directory: _, read_only, users, writers, access, description } = share.remove("work").unwrap();
    assert_eq!((read_only, users, access.is_some(), description.is_some()), (false, None, true, true));
    assert_eq!(writers.as_deref(), Some("exclusive"));
}

#[test]
fn a_share_has_a_name_of_its_own_and_users_that_the_node_can_be() {
    let got = load(&["--share", "home=/srv/home,ro"], Some("shares = ['a=/a']\n[share.b]\ndirectory = '/b'")).unwrap();
    let names: Vec<_> = got.shares.iter().map(|share| share.name.as_str()).collect();
    assert_eq!(names, ["a", "b", "home"]);
    let refused = |flags: &[&str], said: &str| {
        let error = load(flags, None).unwrap_err();
        assert!(error.contains(said), "{error}");
    };
    refused(&["--share", "a=/a", "--volume", "a=/b"], "given to a volume or another share");
    refused(&["--share", "a=/a", "--share", "a=/b"], "given to a volume or another share");
    refused(&["--share", "a=/a,users=trust", "--user", "nobody"], "leave one of them out");
    refused(&["--share", "a=/a,access=store2"], "give --tls-client-ca");
    refused(&["--share", "a=/a,rw"], "--share `a=/a,rw`: character 6");
}

#[test]
fn the_nodes_stage_is_for_direct_volumes_that_do_not_say_theirs() {
    let file = "volumes = ['a=/a,direct', 'b=/b', 'c=/c,direct,stage=memory']\nstage = 'device'";
    let stages = |got: Configuration| got.volumes.into_iter().map(|volume| volume.stage).collect::<Vec<_>>();
    let got = stages(load(&[], Some(file)).unwrap());
    assert_eq!(got, [Some(Stage::Device), None, Some(Stage::Memory)]);
    let got = stages(load(&["--stage", "memory"], Some(file)).unwrap());
    assert_eq!(got, [Some(Stage::Memory), None, Some(Stage::Memory)]);
    let table = "[volume.a]\nstore = '/a'\ndirect = true\nstage = 'device'";
    assert_eq!(stages(load(&[], Some(table)).unwrap()), [Some(Stage::Device)]);
    assert_eq!(stages(load(&["--volume", "a=/a,direct"], None).unwrap()), [None]);
}

#[test]
fn more_memory_than_there_is_is_refused() {
    let loaded = |text| load(&[], Some(text)).unwrap();
    let check = |text, memory| loaded(text).check_memory(memory).map_err(|error| error.to_string());
    let gib = |n: u64| Some(n << 30);
    for (text, parts) in [
        ("buffer_memory = '2G'", ["buffer_memory", "2.0 GiB is more than the memory", "1.0 GiB; give less"]),
        ("volumes = ['a=mem:1M', 'b=mem:2G']", ["volume `b`", "2.0 GiB is more than the memory", "1.0 GiB; give less"]),
    ] {
        let said = check(text, gib(1)).unwrap_err();
        assert!(parts.iter().all(|part| said.contains(part)), "{said}");
        assert_eq!(check(text, gib(2)), Ok(()));
        assert_eq!(check(text, None), Ok(()));
    }
}

/// Each message names the file and the key, or the flag, and what to write.
#[test]
fn errors_name_the_key_and_the_file() {
    let in_file = |text| load(&[], Some(text)).unwrap_err();
    for (text, parts) in [
        ("volume = 3", ["FILE", "volume"]),
        ("volume = ['a=mem:1M']", ["FILE", "write volumes = ["]),
        ("volumes = ['a=/srv/f', 'b=/srv/f']", ["volume `b`", "volume `a` writes to /srv/f as well"]),
        ("volumes = ['a=/srv/f', 'b=stripe:chunk=64K:/srv/e:/srv/f']", ["volume `b`", "/srv/f as well"]),
        ("nbd = ['127.0.0.1']", ["FILE: nbd", "write tcp://HOST:PORT or unix:///PATH"]),
        ("colour = 1", ["FILE", "unknown field `colour`"]),
        ("[volume.a]\nstore = 'mem:1M'\nspeed = 1", ["FILE", "unknown field `speed`"]),
        ("[volume.a]\nstore = 'mem:1'", ["FILE: volume.a.store", "multiple of 512"]),
        ("[volume.a]\nstore = 'mem:1M'\ndirect = true", ["FILE: volume.a.direct", "leave it out"]),
        ("[volume.'a/b']\nstore = 'mem:1M'", ["FILE: volume.a/b", "use only"]),
        ("volumes = ['a=mem:1M', 'b']", ["FILE: volumes[1]", "write NAME=PATH"]),
        ("nbd = ['localhost']", ["FILE: nbd", "tcp://HOST:PORT"]),
        ("allow = ['10.1.1.1/8']", ["FILE: allow", "write 10.0.0.0/8"]),
        ("io = 'fast'", ["FILE: io", "auto, uring, epoll"]),
        ("volumes = ['a=mem:1M', 'a=mem:2M']", ["volume `a`", "rename one"]),
        ("buffer_memory = '1K'", ["buffer_memory", "at least 4M"]),
        ("buffer_memory = '2T'", ["buffer_memory", "at most 1T"]),
        ("mmap_limit = '15M'", ["mmap_limit", "at least 16M"]),
        ("mmap_limit = 'much'", ["FILE: mmap_limit", "invalid size"]),
        ("stage = 'disk'", ["FILE: stage", "memory, device"]),
        ("stage = 'device'\nvolumes = ['a=mem:1M']", ["stage", "no volume is direct"]),
        ("[volume.a]\nstore = '/a'\nstage = 'device'", ["FILE: volume.a.stage", "add direct"]),
        ("threads = 0", ["threads", "1 to 256"]),
        ("threads = 300000", ["FILE: threads", "300000 event loops; give 1 to 256"]),
        ("threads = '2'", ["FILE", "expected u64; write a whole number of at least 0, without quotes"]),
        ("buffer_memory = 64", ["FILE", "expected a string; write a text between quotes"]),
        ("nbd = 'tcp://127.0.0.1'", ["FILE", "expected a sequence; write a list"]),
        ("insecure = 'yes'", ["FILE", "expected a boolean; write true or false"]),
        ("tls = 'cert.pem'", ["FILE", "write a table"]),
        ("control_socket = 3", ["FILE", "write a text between quotes"]),
        ("nbd = ['tcp://127.0.0.1:99999']", ["FILE: nbd", "invalid port `99999`; ports are 0 to 65535"]),
        ("[volume.a]\nstore = 'mem:1M'\nrate = '5'", ["FILE: volume.a.rate", "under 1K/s"]),
        ("volumes = ['a=mem:1M,tls=required']", ["volume `a`", "--tls-certificate"]),
        ("[volume.a]\nstore = 'mem:1M'\naccess = []", ["FILE: volume.a.access", "leave access out"]),
        ("[volume.a]\nstore = 'mem:1M'\naccess = ['10.0.0.1/8']", ["FILE: volume.a.access", "write 10.0.0.0/8"]),
        ("[volume.a]\nstore = 'mem:1M'\naccess = ['vm1']", ["volume `a`", "give --tls-client-ca"]),
        ("[volume.a]\nstore = '/a'\nshared = true", ["FILE: volume.a.shared", "add direct"]),
        ("[tls]\ncertificate = 'c'\nkey = 'k'\ncrl = 'r'", ["tls", "give --tls-client-ca"]),
    ] {
        let error = in_file(text);
        assert!(parts.iter().all(|part| error.contains(part)), "{text}: {error}");
    }
    let error = load(&["--volume", "a=mem:1"], None).unwrap_err();
    assert!(error.starts_with("--volume `a=mem:1`: character 7:"), "{error}");
    // Those that lock nothing may share it.
    assert!(load(&[], Some("volumes = ['a=/srv/f', 'b=/srv/f,ro']")).is_ok());
    let http = |text| load(&["--http", text], None).map(|got| got.http.unwrap().port());
    assert_eq!(http("http://127.0.0.1:4712"), Ok(4712));
    assert!(http("http://127.0.0.1:4712/metrics").unwrap_err().contains("write ADDRESS:PORT"));
    let missing = load(&["--config", "/nonexistent/byway.toml"], None).unwrap_err();
    assert!(missing.contains("/nonexistent/byway.toml") && missing.contains("--config"), "{missing}");
}

#[test]
fn wide_listeners_are_refused_without_a_guard() {
    let wide = |flags: &[&str]| {
        let got = load(&[&["--nbd", "tcp://0.0.0.0:1", "--http", "0.0.0.0:2"], flags].concat(), None).unwrap();
        let listeners = resolve(&got.nbd).unwrap();
        assert_eq!(listeners.len(), 1);
        (got.admit(&listeners).map_err(|e| e.to_string()), got.admitted_http().map_err(|e| e.to_string()))
    };
    let (nbd, http) = wide(&[]);
    assert!(nbd.unwrap_err().contains("--tls-client-ca"));
    assert!(http.is_err());
    let tls = ["--tls-certificate", "c", "--tls-key", "k", "--tls-client-ca", "ca"];
    let (nbd, http) = wide(&tls);
    assert!(nbd.is_ok());
    assert!(http.is_err(), "HTTP has no TLS");
    let (nbd, _) = wide(&[&tls[..], &["--tls", "optional"]].concat());
    assert!(nbd.unwrap_err().contains("can be reached"), "plain clients show no certificate");
    let (nbd, _) = wide(&[&tls[..], &["--tls-clients", "optional"]].concat());
    assert!(nbd.unwrap_err().contains("can be reached"));
    let (nbd, http) = wide(&["--allow", "10.0.0.0/8", "--insecure"]);
    assert!(nbd.is_ok() && http.is_ok());
}

#[test]
fn clients_certificates_need_a_ca() {
    let flags = ["--tls-certificate", "c", "--tls-key", "k", "--tls-clients", "required"];
    assert!(load(&flags, None).unwrap_err().contains("--tls-client-ca"));
}
