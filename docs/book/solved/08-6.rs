pub fn receives(&self) -> u64 {
    self.slots
}
