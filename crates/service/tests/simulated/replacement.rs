//! A reload that gives a volume's name to another store, and an operator who has its files opened anew.

use std::sync::Arc;
use std::time::Duration;

use byway_reactor::sim::{FaultPlan, SimFile};
use byway_reactor::{Completion, FileOptions, Op, OpenFile, Outcome, Token, Wait};
use byway_service::block::Volume;

use super::user::User;
use super::{SERVER_IP, Simulation};

/// Longer than a sync takes.
const COPIED_WITHIN: Duration = Duration::from_millis(200);

impl Simulation {
    /// The server's process stays; of the old store the new one has what is durable. Nothing else runs meanwhile, so that
    /// nothing is answered by the old store that the new one lacks.
    pub(super) fn replace_volume(&mut self) {
        if self.server.is_none() {
            return;
        }
        self.replacements += 1;
        self.world.faults(FaultPlan::default());
        let copies = self.files.iter().enumerate().map(|(index, file)| {
            let bytes = file.durable();
            let name = format!("disk-{index}-{}", self.replacements);
            (self.world.disk(SERVER_IP).file(&name, bytes.len() as u64), bytes)
        });
        let copies: Vec<(SimFile, Vec<u8>)> = copies.collect();
        for (file, bytes) in &copies {
            self.fill_durably(file, bytes);
        }
        self.files = copies.into_iter().map(|(file, _)| file).collect();
        self.world.faults(self.plan());
        let volume = self.open_volume();
        self.serve_instead(volume);
        self.users.iter_mut().for_each(User::server_lost_unflushed);
    }

    /// The same files, opened anew, as `byway ctl reopen` does: the server forgets that a flush failed. What that one covered no
    /// later flush makes durable, unless its client sends it again.
    pub(super) fn reopen_volume(&mut self) {
        let store = self.open_volume().store().clone();
        let Some(old) = self.volume() else { return };
        let volume = old.reopened_by(store, old.options().clone());
        self.reopenings += 1;
        self.serve_instead(volume);
    }

    pub(super) fn volume(&self) -> Option<&Arc<Volume>> {
        let serving = self.server.as_ref()?;
        serving.engine.volume(serving.volume)
    }

    fn serve_instead(&mut self, volume: Volume) {
        let Some(serving) = &mut self.server else { return };
        let old = serving.volume;
        serving.server.withdraw(old);
        serving.server.dismiss_users(&mut serving.reactor, old);
        serving.engine.detach(&mut serving.reactor, old);
        serving.volume = serving.engine.attach(&mut serving.reactor, Arc::new(volume));
        serving.server.offer(serving.volume);
    }

    fn fill_durably(&mut self, file: &SimFile, bytes: &[u8]) {
        let open = Arc::new(OpenFile::simulated(file.clone(), FileOptions::default()));
        let file = self.copier.add_file(open);
        // Whether the page cache takes a write at once is a matter of chance.
        while self.copier.try_write(file, 0, bytes).is_err() {}
        self.copier.submit(Op::Sync { file }, Token::new(1, 1, 0, 0));
        let (copier, mut completions) = (&mut self.copier, Vec::new());
        let until = self.world.now() + COPIED_WITHIN;
        self.world.run_until(until, || copier.reap(&mut completions, Wait::Poll).map(drop).unwrap());
        let synced = |completion: &Completion| matches!(completion.outcome, Outcome::Synced(Ok(())));
        assert!(completions.iter().any(synced), "the copy is durable");
        self.copier.remove_file(file);
    }
}
