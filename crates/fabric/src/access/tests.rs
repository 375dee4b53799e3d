use proptest::prelude::*;

use super::*;

fn access(text: &str) -> Access {
    text.parse().unwrap()
}

fn at(address: &str) -> Identity {
    Identity::new(Origin::Address(address.parse().unwrap()))
}

fn named(names: &[&str]) -> Identity {
    at("192.0.2.1").named(names.iter().map(|name| (*name).to_owned()).collect())
}

#[test]
fn the_forms_of_the_manual_are_read() {
    let list = access("store2,VM.Example:ro,spiffe://cluster/vm:ro,10.0.0.0/8,fd00::/8:ro,192.0.2.7,unix:ro");
    for (client, right) in [
        (named(&["other", "store2"]), Some(Right::Write)),
        (named(&["vm.example"]), Some(Right::Read)),
        (named(&["spiffe://cluster/vm"]), Some(Right::Read)),
        (named(&["spiffe://cluster/VM"]), None),
        (named(&["store"]), None),
        (named(&[]), None),
        (at("10.1.2.3"), Some(Right::Write)),
        (at("fd12::1"), Some(Right::Read)),
        (at("192.0.2.7"), Some(Right::Write)),
        (Identity::new(Origin::Unix), Some(Right::Read)),
        (Identity::new(Origin::Unknown), None),
    ] {
        assert_eq!(list.right(&client), right, "{client}");
    }
    assert_eq!(Access::default().right(&Identity::default()), Some(Right::Write));
    assert!(list.names_certificates() && !access("10.0.0.0/8,unix").names_certificates());
}

#[test]
fn what_is_no_client_is_refused_with_a_remedy() {
    for (bad, remedy) in [
        ("", "leave access out"),
        ("store,", "leave access out"),
        (":ro", "leave access out"),
        ("a b", "is no client"),
        ("store:rw", "ADDRESS/BITS"),
        ("10.0.0.0/33", "ADDRESS/BITS"),
        ("10.0.0", "ADDRESS/BITS"),
        ("10.1.0.0/8", "write 10.0.0.0/8"),
        ("store/8", "ADDRESS/BITS"),
        ("://x", "is no client"),
        ("spiffe://a b", "is no client"),
    ] {
        let said = bad.parse::<Access>().unwrap_err().to_string();
        assert!(said.contains(remedy), "`{bad}`: {said}");
    }
    let long = "x".repeat(ACCESS_NAME_BYTES_MAX + 1);
    assert!(matches!(long.parse::<Access>(), Err(AccessError::Client(_))));
    let many = vec!["x"; ACCESS_ENTRIES_MAX + 1].join(",");
    assert_eq!(many.parse::<Access>(), Err(AccessError::TooMany));
}

/// A certificate's DNS names and URIs are its names; what it holds besides is not.
#[test]
fn the_names_of_a_certificate_are_its_alternative_names() {
    use rcgen::{DnType, SanType};
    let mut params = rcgen::CertificateParams::new(vec!["Store2.Example".to_owned(), "192.0.2.9".to_owned()]).unwrap();
    params.distinguished_name.push(DnType::CommonName, "admin");
    for uri in ["spiffe://cluster/Vm", "store3"] {
        params.subject_alt_names.push(SanType::URI(uri.try_into().unwrap()));
    }
    params.subject_alt_names.push(SanType::Rfc822Name("root@example".try_into().unwrap()));
    let certificate = params.self_signed(&rcgen::KeyPair::generate().unwrap()).unwrap();
    let identity = at("192.0.2.1").certified(certificate.der());
    assert_eq!(identity.names(), ["store2.example", "spiffe://cluster/Vm"]);
    assert_eq!(identity.to_string(), "store2.example, spiffe://cluster/Vm at 192.0.2.1");
    assert_eq!(at("192.0.2.1").certified(&CertificateDer::from(vec![1, 2, 3])), at("192.0.2.1"));
}

fn any_range() -> impl Strategy<Value = Cidr> {
    // Few addresses, so that ranges often contain them.
    (0u8..4, 0u8..4, prop::sample::select(vec![0u8, 8, 16, 24, 31, 32])).prop_map(|(a, b, bits)| {
        let address = u32::from_be_bytes([10, 0, a, b]);
        let network = address & u32::MAX.checked_shl(32 - u32::from(bits)).unwrap_or(0);
        format!("{}/{bits}", std::net::Ipv4Addr::from(network)).parse().unwrap()
    })
}

fn any_name() -> impl Strategy<Value = String> {
    prop_oneof!["[a-c]{1,2}", "[a-c]{1,2}\\.x", "spiffe://[a-c]{1,2}", "\\*\\.x"].prop_map(String::from)
}

fn any_entry() -> impl Strategy<Value = Entry> {
    let client =
        prop_oneof![any_name().prop_map(Client::Name), any_range().prop_map(Client::Range), Just(Client::Unix)];
    (client, prop::sample::select(vec![Right::Read, Right::Write])).prop_map(|(client, right)| Entry { client, right })
}

fn any_access() -> impl Strategy<Value = Access> {
    prop::collection::vec(any_entry(), 1..6).prop_map(|entries| Access { entries })
}

fn any_identity() -> impl Strategy<Value = Identity> {
    let address = (0u8..4, 0u8..4).prop_map(|(a, b)| Origin::Address(IpAddr::from([10, 0, a, b])));
    let origin = prop_oneof![3 => address, 1 => Just(Origin::Unix), 1 => Just(Origin::Unknown)];
    (origin, prop::collection::vec(any_name(), 0..3)).prop_map(|(origin, names)| Identity::new(origin).named(names))
}

proptest! {
    #[test]
    fn what_is_written_reads_back(access in any_access()) {
        prop_assert_eq!(access.to_string().parse::<Access>(), Ok(access.clone()), "{}", access);
    }

    #[test]
    fn no_text_makes_the_parser_panic(text in "[a-z0-9:./,*@\"\\\\ é-]{0,40}") {
        if let Ok(access) = text.parse::<Access>() {
            prop_assert!(!access.is_open(), "a list that somebody wrote lets everybody in");
            prop_assert_eq!(access.to_string().parse::<Access>(), Ok(access));
        }
    }

    /// The order of entries does not matter, and a further entry takes nothing away.
    #[test]
    fn a_client_has_the_highest_right_of_its_entries(entries in prop::collection::vec(any_entry(), 1..6), client in any_identity()) {
        let right = |entries: &[Entry]| Access { entries: entries.to_vec() }.right(&client);
        let mut backwards = entries.clone();
        backwards.reverse();
        prop_assert_eq!(right(&entries), right(&backwards));
        let one_by_one = entries.iter().filter_map(|entry| right(std::slice::from_ref(entry))).max();
        prop_assert_eq!(right(&entries), one_by_one);
        if entries.len() > 1 {
            prop_assert!(right(&entries[1..]) <= right(&entries));
        }
    }

    /// A client that no entry is about has no right: not by a part of its name, not by another client's address.
    #[test]
    fn a_stranger_has_no_right(access in any_access(), names in prop::collection::vec("[d-f]{1,3}(\\.x)?", 0..3)) {
        let stranger = at("192.0.2.1").named(names);
        let ranges_exclude = access.entries.iter().all(|entry| match &entry.client {
            Client::Range(range) => !range.contains("192.0.2.1".parse().unwrap()),
            _ => true,
        });
        prop_assume!(ranges_exclude);
        prop_assert_eq!(access.right(&stranger), None);
    }
}
