//! A volume that replaces another one over the same file: no write of the old one lands over a newer one.

use super::*;

/// How long the store takes for the first write.
const STORE_TIME: Duration = Duration::from_millis(100);

#[test]
fn requests_wait_for_those_on_the_volume_that_was_replaced() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for (at, io) in BACKENDS.into_iter().enumerate() {
        let store = path_store(&file(folder.path(), &format!("disk{at}"), 1 << 20));
        let effect = FaultEffect::Delay(STORE_TIME);
        let rule = FaultRule { operation: FaultOperation::Write, effect, range: None, count_max: Some(1) };
        let slow = VolumeOptions { faults: FaultRules(vec![rule]), ..VolumeOptions::default() };
        let mut rig = Rig::new(io, store.clone(), slow);
        let old = rig.volume;
        let step = rig.engine.write_small(&mut rig.reactor, old, 0, b"old", WriteFlags::default(), Tag(7));
        assert!(matches!(step, Ok(Step::Later)), "{step:?}");

        let options = VolumeOptions::default();
        let reopened = Arc::new(rig.engine.volume(old).unwrap().reopened_by(store.clone(), options.clone()));
        // Replaced once more: the first is not forgotten.
        let new = Arc::new(reopened.replaced_by(store, options));
        drop(reopened);
        rig.volume = rig.engine.attach(&mut rig.reactor, new);
        rig.engine.detach(&mut rig.reactor, old);
        let busy = |step: Result<Step<()>, BlockError>| matches!(step, Ok(Step::Busy));
        let Rig { engine, reactor, volume } = &mut rig;
        let flags = ZeroFlags::default();
        assert!(busy(engine.zero(reactor, *volume, ByteRange::new(0, 512), flags, Tag(7))));
        assert!(busy(engine.trim(reactor, *volume, ByteRange::new(0, 512), false, Tag(7))));
        assert!(busy(
            engine
                .read(reactor, *volume, ByteRange::new(0, 3), ReadFlags::default(), Tag(7))
                .map(|step| step.map(drop))
        ));
        assert!(busy(engine.write_small(reactor, *volume, 0, b"new", WriteFlags::default(), Tag(7))));
        assert!(engine.throttled_until().is_some(), "the front ends are told when to ask again");

        assert!(matches!(rig.wait(), Outcome::Unit(Ok(()))), "the old write lands");
        assert_eq!(rig.write_small(0, b"new", false), Ok(()));
        assert_eq!(rig.read(0, 3), Ok(b"new".to_vec()));
    }
}
