//! Gang scheduling: all vCPUs of a VM at the same time, or none.

/// Which groups run together, and which of them do now.
#[derive(Clone, Debug)]
pub struct Gang {
    /// The gang of each group.
    gang_of: Vec<usize>,
    gangs: usize,
    active: usize,
}

impl Gang {
    /// Packs groups, which occupy these CPUs each, into as few gangs as come out by putting each into the first in which nobody
    /// needs the same CPU (for groups that are not pinned: in which there is room).
    pub fn pack(groups: &[Vec<usize>], cpus: usize) -> Self {
        let mut taken: Vec<Vec<bool>> = Vec::new();
        let gang_of = groups
            .iter()
            .map(|needs| {
                let fits = |gang: &Vec<bool>| needs.iter().all(|&cpu| !gang[cpu]);
                let gang = taken.iter().position(fits).unwrap_or_else(|| {
                    taken.push(vec![false; cpus]);
                    taken.len() - 1
                });
                needs.iter().for_each(|&cpu| taken[gang][cpu] = true);
                gang
            })
            .collect();
        Self { gang_of, gangs: taken.len().max(1), active: 0 }
    }

    /// How many gangs take turns.
    pub fn len(&self) -> usize {
        self.gangs
    }

    /// Whether there is nothing to take turns with.
    pub fn is_empty(&self) -> bool {
        self.gangs == 0
    }

    pub(super) fn is_active(&self, group: usize) -> bool {
        self.gang_of.get(group).is_none_or(|&gang| gang == self.active)
    }

    pub(super) fn rotate(&mut self) {
        self.active = (self.active + 1) % self.gangs;
    }
}
