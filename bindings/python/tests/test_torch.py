"""The backend "tinynccl" of torch.distributed: the checks of check_*.py, which make the calls of PyTorch's own c10d tests."""

import os
import tempfile
import unittest
import unittest.mock

from harness import ranks

try:
    import checks
except ImportError:
    checks = None


@unittest.skipIf(checks is None, "no torch here")
class Torch(unittest.TestCase):
    def launch(self, size, target, *args):
        with tempfile.TemporaryDirectory() as folder:
            return ranks(size, target, *args, os.path.join(folder, "store"), join=False)

    def returned(self, outcomes):
        for rank, outcome in enumerate(outcomes):
            self.assertEqual((outcome.kind, outcome.exitcode), ("returned", 0), f"rank {rank}: {outcome}")
            for name, result in (outcome.value or {}).items():
                self.assertEqual(result, "passed", f"{name} on rank {rank}")

    def test_together(self):
        for size in (2, 3) if checks.DEVICE == "cpu" else (2,):
            outcomes = self.launch(size, checks.run_check, "all", "tinynccl")
            self.returned(outcomes)
            self.assertGreater(len(outcomes[0].value), 35)

    def test_messages_over_a_store_that_serves_one_thread_at_a_time(self):
        for name in ("send_recv", "receives_first", "isend_irecv"):
            self.launch_and_return(2, name)
        if checks.DEVICE == "cpu":
            self.launch_and_return(3, "recv_any_source")

    def launch_and_return(self, size, name):
        outcomes = self.launch(size, checks.run_check_over_tcp, name, "tinynccl")
        self.returned(outcomes)
        for outcome in outcomes:
            self.assertEqual(outcome.value, {name: "passed"})

    def test_as_one_of_several_backends(self):
        import tinynccl.torch

        if tinynccl.torch.Backend is None or checks.DEVICE != "cpu":
            self.skipTest(f"torch {checks.torch.__version__} has no backends made in Python, or TEST_DEVICE is not cpu")
        outcomes = self.launch(2, checks.run_check, "all", "cpu:tinynccl,cuda:gloo")
        self.returned(outcomes)
        self.assertGreater(len(outcomes[0].value), 35)
        self.returned(self.launch(2, checks.run_any_source_in_a_part, "cpu:tinynccl,cuda:gloo"))

    def test_sums_are_exact_where_the_variable_says_so(self):
        with unittest.mock.patch.dict(os.environ, TINYNCCL_SUM="exact"):
            self.returned(self.launch(3 if checks.DEVICE == "cpu" else 2, checks.run_exact_sums, "tinynccl"))

    def test_what_is_not_there_is_said(self):
        if checks.DEVICE == "cpu":
            self.skipTest("on the CPU all of it is there; TEST_DEVICE=cuda")
        outcomes = self.launch(2, checks.run_check_briefly, "recv_any_source", "tinynccl")
        self.assertRegex(outcomes[0].value, "recv: rank 0: a receive from any rank takes tensors on the CPU", outcomes)


if __name__ == "__main__":
    unittest.main(verbosity=2)
