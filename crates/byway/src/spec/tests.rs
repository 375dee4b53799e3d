use std::path::PathBuf;
use std::time::Duration;

use byway_fabric::access::Access;
use byway_reactor::{ByteRange, Errno};
use byway_service::block::spec::{FaultEffect, FaultOperation, FaultRule, FaultRules, Stage};
use proptest::prelude::*;

use super::*;

fn path(text: &str) -> StoreSpec {
    StoreSpec::Path(PathBuf::from(text))
}

#[test]
fn the_forms_of_the_manual_are_read() {
    assert_eq!(parse("disk=/srv/a.img").unwrap().store, path("/srv/a.img"));
    assert_eq!(parse("m=mem:1G").unwrap().store, StoreSpec::Memory { bytes: 1 << 30 });
    assert_eq!(parse("n=null:512").unwrap().store, StoreSpec::Null { bytes: 512 });
    let stripe = StoreSpec::Stripe { chunk_bytes: 65536, paths: vec!["/dev/a".into(), "/dev/b".into()] };
    assert_eq!(parse("s=stripe:chunk=64K:/dev/a:/dev/b").unwrap().store, stripe);
    let all =
        parse("d=/a,ro,direct,tls=required,rate=100M/s,shared,access=vm1,access=10.0.0.0/8:ro,description=the old one");
    let all = all.unwrap();
    assert!(all.read_only && all.direct && all.tls_required && all.shared);
    assert_eq!(all.rate_bytes_per_second, Some(100 << 20));
    assert_eq!(all.access, "vm1,10.0.0.0/8:ro".parse().unwrap());
    assert_eq!(all.description.as_deref(), Some("the old one"));
    assert_eq!(
        parse(r#"d=/a,access="vm1,fd00::/8:ro",access=unix"#).unwrap().access,
        "vm1,fd00::/8:ro,unix".parse().unwrap()
    );
}

#[test]
fn marks_are_themselves_behind_a_backslash_or_in_quotes() {
    assert_eq!(parse(r"d=/a\,b").unwrap().store, path("/a,b"));
    assert_eq!(parse(r#"d="/a,b",ro"#).unwrap().store, path("/a,b"));
    assert_eq!(parse(r#"d="mem:1G""#).unwrap().store, path("mem:1G"));
    assert_eq!(parse(r"d=mem\:1G").unwrap().store, path("mem:1G"));
    assert_eq!(parse("d=./mem:1G").unwrap().store, path("./mem:1G"));
    assert_eq!(parse("d=/dev/disk/by-path/pci-0:0").unwrap().store, path("/dev/disk/by-path/pci-0:0"));
    assert_eq!(parse(r#"d=/a,description="say \"x\\y\", then""#).unwrap().description.unwrap(), r#"say "x\y", then"#);
    let stripe = StoreSpec::Stripe { chunk_bytes: 4096, paths: vec!["/a:b".into(), "/c".into()] };
    assert_eq!(parse(r"s=stripe:chunk=4K:/a\:b:/c").unwrap().store, stripe);
}

#[test]
fn fault_rules_wrap_any_store() {
    let spec = parse("f=fault:any=10ms:read=eio@1M+64K#1:write=short:mem:1M").unwrap();
    let rule = |operation, effect, range, count_max| FaultRule { operation, effect, range, count_max };
    let rules = FaultRules(vec![
        rule(FaultOperation::Any, FaultEffect::Delay(Duration::from_millis(10)), None, None),
        rule(
            FaultOperation::Read,
            FaultEffect::Error(Errno::IO),
            Some(ByteRange { offset: 1 << 20, len: 65536 }),
            Some(1),
        ),
        rule(FaultOperation::Write, FaultEffect::Short, None, None),
    ]);
    let inner = Box::new(StoreSpec::Memory { bytes: 1 << 20 });
    assert_eq!(spec.store, StoreSpec::Fault { inner, rules });
    assert_eq!(spec.store.paths().len(), 0);
}

/// Every message names what is wrong and what to write instead; the column says where.
#[test]
fn errors_name_the_place_and_the_remedy() {
    let cases: [(&str, usize, &str); 38] = [
        ("", 1, "write NAME=PATH"),
        ("/srv/disk.img", 1, "write NAME=PATH"),
        ("=/a", 1, "write NAME=PATH"),
        ("a b=/a", 1, "character ' '"),
        ("d=", 3, "the path is missing"),
        ("d=memory:1G", 3, "./memory:"),
        ("d=mem:", 7, "for example"),
        ("d=mem:1000", 7, "for example 1024"),
        ("d=mem:0", 7, "for example 512"),
        ("d=null:1X", 8, "invalid size `1X`"),
        ("d=stripe:/a:/b", 10, "stripe:chunk=64K"),
        ("d=stripe:chunk=5K:/a:/b", 16, "power of two"),
        ("d=stripe:chunk=64K:/a", 20, "1 path(s)"),
        ("d=stripe:chunk=64K:/a::/b", 23, "the path is missing"),
        ("d=/a,rw", 6, "unknown option `rw`"),
        ("d=/a,ro,ro", 9, "`ro` is given twice"),
        ("d=/a,ro=yes", 6, "have no value"),
        ("d=/a,rate=0", 11, "under 1K/s"),
        ("d=/a,rate=5", 11, "5 bytes per second is under 1K/s; write for example 100M/s"),
        ("d=/a,rate", 6, "write rate=SIZE"),
        ("d=/a,tls=optional", 6, "tls=required"),
        ("d=/a,format=qcow2", 6, "qemu-img convert -O raw"),
        ("d=/a,format=raw,format=raw", 17, "`format` is given twice"),
        ("d=mem:1M,direct", 10, "leave it out"),
        ("d=/a,stage=device", 6, "add direct"),
        ("d=/a,direct,stage=disk", 13, "stage=device or stage=memory"),
        ("d=/a,stage=memory,direct,stage=device", 26, "`stage` is given twice"),
        ("d=/a,access", 6, "write access=CLIENT"),
        ("d=/a,access=", 13, "leave access out"),
        ("d=/a,access=10.1.0.0/8", 13, "write 10.0.0.0/8"),
        ("d=/a,access=vm1,vm2", 17, "unknown option `vm2`"),
        ("d=/a,shared", 6, "add direct"),
        ("d=\"/a", 3, "not closed"),
        ("d=/a\\", 5, "backslash"),
        ("d=fault:/a", 9, "fault:read=eio:STORE"),
        ("d=fault:seek=eio:/a", 9, "unknown operation `seek`"),
        ("d=fault:read=ebusy:/a", 14, "unknown effect `ebusy`"),
        ("d=fault:read=eio@1M:/a", 18, "@OFFSET+LENGTH"),
    ];
    for (spec, column, part) in cases {
        let error = parse(spec).expect_err(spec);
        assert_eq!(error.column, column, "{spec}: {error}");
        assert!(error.to_string().contains(part), "{spec}: {error}");
    }
}

#[test]
fn what_is_too_long_or_too_deep_is_refused() {
    assert_eq!(parse(&"x".repeat(limits::SPEC_BYTES_MAX + 1)).unwrap_err().fault, SpecFault::TooLong);
    let deep = format!("d={}mem:1M", "fault:read=eio:".repeat(limits::FAULT_DEPTH_MAX + 1));
    assert!(matches!(parse(&deep).unwrap_err().fault, SpecFault::TooManyFaults(_)));
    let wide = format!("d=fault:{}mem:1M", "read=eio:".repeat(limits::FAULT_RULES_MAX + 1));
    assert!(matches!(parse(&wide).unwrap_err().fault, SpecFault::TooManyFaults(_)));
    let long = format!("d=/a,description={}", "x".repeat(limits::DESCRIPTION_BYTES_MAX + 1));
    assert_eq!(parse(&long).unwrap_err().fault, SpecFault::Description);
}

fn any_path() -> impl Strategy<Value = PathBuf> {
    // Marks, quotes and words that are schemes or rules are the interesting ones.
    prop_oneof!["[a-z/,:=\"\\\\ @#+é]{1,12}", "(mem|null|fault|stripe|read|x):[a-z0-9=]{0,4}", "read=[a-z]{1,3}"]
        .prop_map(PathBuf::from)
}

fn any_rule() -> impl Strategy<Value = FaultRule> {
    let effect = prop_oneof![
        (0u64..10_000_000).prop_map(|micros| FaultEffect::Delay(Duration::from_micros(micros))),
        prop::sample::select(fault::ERRORS.to_vec()).prop_map(|(_, errno)| FaultEffect::Error(errno)),
        Just(FaultEffect::Short),
    ];
    let operation = prop::sample::select(fault::OPERATIONS.to_vec()).prop_map(|(_, operation)| operation);
    let range = prop::option::of((any::<u64>(), 1u64..).prop_map(|(offset, len)| ByteRange { offset, len }));
    (operation, effect, range, prop::option::of(1u64..)).prop_map(|(operation, effect, range, count_max)| FaultRule {
        operation,
        effect,
        range,
        count_max,
    })
}

fn any_store() -> impl Strategy<Value = StoreSpec> {
    let sectors = 1..=limits::VOLUME_BYTES_MAX / 512;
    let leaf = prop_oneof![
        any_path().prop_map(StoreSpec::Path),
        sectors.clone().prop_map(|sectors| StoreSpec::Memory { bytes: sectors * 512 }),
        sectors.prop_map(|sectors| StoreSpec::Null { bytes: sectors * 512 }),
        (12u32..27, prop::collection::vec(any_path(), 2..5))
            .prop_map(|(shift, paths)| { StoreSpec::Stripe { chunk_bytes: 1 << shift, paths } }),
    ];
    leaf.prop_recursive(limits::FAULT_DEPTH_MAX as u32, 8, 1, |inner| {
        (inner, prop::collection::vec(any_rule(), 1..4))
            .prop_map(|(inner, rules)| StoreSpec::Fault { inner: Box::new(inner), rules: FaultRules(rules) })
    })
}

prop_compose! {
    fn any_volume()(
        name in "[A-Za-z0-9._-]{1,64}", store in any_store(), read_only: bool, direct: bool, tls_required: bool,
        rate_bytes_per_second in prop::option::of(limits::RATE_BYTES_MIN..), shared: bool, raw: bool, description in prop::option::of(".{0,20}"),
        stage in prop::option::of(prop::sample::select(vec![Stage::Memory, Stage::Device])),
        access in prop::collection::vec("(vm[1-3]|spiffe://c/[a-z]|10\\.0\\.0\\.[0-9]|fd00::/8|unix)(:ro)?", 0..3),
    ) -> VolumeSpec {
        let direct = direct && options::check_direct(&store).is_ok();
        let name = VolumeName::new(&name).unwrap();
        let stage = stage.filter(|_| direct);
        let shared = shared && (direct || store.paths().is_empty());
        let access = if access.is_empty() { Access::default() } else { access.join(",").parse().unwrap() };
        VolumeSpec { access, stage, name, store, read_only, direct, tls_required, rate_bytes_per_second, shared, raw, description }
    }
}

proptest! {
    #[test]
    fn what_is_written_reads_back(volume in any_volume()) {
        prop_assert_eq!(parse(&format(&volume)), Ok(volume.clone()), "{}", format(&volume));
    }

    #[test]
    fn no_text_makes_the_parser_panic(text in "[a-z=:,\"\\\\@#+0-9KMGé]{0,40}") {
        if let Ok(volume) = parse(&text) {
            prop_assert_eq!(parse(&format(&volume)), Ok(volume));
        }
    }
}
